"""What is known of an environment: from its source alone (scan) and from a child that imported it (describe)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class EnvironmentInfo(BaseModel):
    """One environment class, found by reading source text. Nothing was imported."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """The class attribute ``name``, else the file stem."""
    class_name: str
    file_path: str
    description: str
    """First line of the class docstring, else of the module's."""
    stem: str
    """File stem; selects the environment as well."""
    source: Literal["bundled", "user"] = "bundled"
    base: Literal["hermes_rl_mcp", "atroposlib"] = "hermes_rl_mcp"
    """Which BaseEnv the class descends from; ``atroposlib`` needs the ``atropos`` extra."""


class ScanProblem(BaseModel):
    """A file that could not be read as Python; reported, never hidden."""

    file_path: str
    reason: str


class ScanResult(BaseModel):
    environments: list[EnvironmentInfo]
    problems: list[ScanProblem] = Field(default_factory=list)


Section = Literal["env", "openai", "trainer"]
"""Which part of config.yaml a field lives in."""


class FieldInfo(BaseModel):
    """One configurable field, as an agent sees it."""

    name: str
    type: str
    """Readable type, for example ``int``, ``float | None``, ``'a' | 'b'``."""
    default: JsonValue = None
    """What the environment itself starts from: the value out of ``config_init``, not the class default."""
    description: str = ""
    section: Section = "env"
    json_schema: dict[str, JsonValue] = Field(default_factory=dict)
    """The field's JSON schema: minimum, maximum, enum, ..."""


class EnvironmentSchema(BaseModel):
    """Answer of ``describe``: what one environment can be told, and the servers it starts from."""

    name: str
    class_name: str
    config_class: str
    fields: list[FieldInfo]
    server: dict[str, JsonValue] = Field(default_factory=dict)
    """The first server config of ``config_init`` (model_name, server_type, ...)."""
    trainer_defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Trainer fields this environment suggests values for (its class attribute ``trainer_defaults``, for example
    ``{"learning_rate": 1e-3}``). They replace the profile's defaults, never its locks, ceilings or a user's edit."""
    typical_prompt_tokens: int | None = None
    typical_answer_tokens: int | None = None
    """The environment's own expectation (its class attribute ``typical_tokens``), for estimates alone."""


class ValidationReply(BaseModel):
    """Answer of ``describe`` when values were given: pydantic's verdict of the environment's own config class."""

    ok: bool
    values: dict[str, JsonValue] = Field(default_factory=dict)
    """Coerced values of exactly the fields that were given."""
    errors: dict[str, str] = Field(default_factory=dict)
    """Field to sentence."""

"""What the person who starts the server decides. Loading it from flags and variables is done elsewhere."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hermes_rl_mcp.contracts.profiles import LOCAL, Profile

OPENROUTER_URL = "https://openrouter.ai/api/v1"
OPENROUTER_KEY = "OPENROUTER_API_KEY"
KNOWN_MODELS: dict[str, str] = {
    "qwen/qwen3-8b": "small",
    "z-ai/glm-4.7-flash": "medium",
    "minimax/minimax-m2.7": "large",
}
"""What OpenRouter is asked for unless told otherwise, and how large each is."""


class InferenceEndpoint(BaseModel):
    """An OpenAI-compatible endpoint for ``rl_test_inference``; the key travels by environment only."""

    base_url: str
    model_name: str
    further_models: list[str] = []
    """Tested beside ``model_name`` where no models are named."""
    api_key_variable: str = "OPENAI_API_KEY"


class OperatorLimits(BaseModel):
    """Ceilings of one run's estimate, set by the person who starts the server. No tool can raise them; None = none."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_hours: float | None = Field(None, gt=0)
    max_disk_gib: float | None = Field(None, gt=0)
    max_gpu_memory_gib: float | None = Field(None, gt=0)
    ask_hours: float | None = Field(None, gt=0)
    """Beyond this a person is asked before a start; so with the next two."""
    ask_disk_gib: float | None = Field(None, gt=0)
    ask_gpu_memory_gib: float | None = Field(None, gt=0)


class Settings(BaseModel):
    """The operator's side of the product; an agent can read parts of it and change none."""

    model_config = ConfigDict(extra="forbid")

    home: str
    """``$HERMES_HOME``."""
    session: str = "session"
    """Name of the selection file; clients that must not share a selection use different names."""
    profile: Profile = Field(default_factory=lambda: LOCAL)
    """With locks, unlocks and further models already applied."""
    env_dirs: list[str] = Field(default_factory=list)
    """Folders searched for environments beside the bundled ones."""
    data_dirs: list[str] = Field(default_factory=list)
    """Folders whose data sets an agent may look into, beside ``env_dirs`` and what the installation brings."""
    atropos_python: str | None = None
    """Interpreter for environments written for Atropos; None = as installed, else the product's own."""
    limits: OperatorLimits = Field(default_factory=OperatorLimits)
    inference: InferenceEndpoint | None = None
    """Endpoint for ``rl_test_inference``; None = the local model of the profile."""
    read_only: bool = False
    """Whether only what changes nothing may be asked for: no tool that writes is offered, no run starts or stops."""
    tools: list[str] | None = None
    """Names of the tools that are offered; None = all."""
    exclude_tools: list[str] = Field(default_factory=list)
    """Names of tools that are not."""

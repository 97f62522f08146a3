"""One flat namespace out of the environment's fields, the server entry and the trainer's settings.

Pure: from schema, profile and edits to the fields an agent sees and to the parts of a RunRequest. Precedence, lowest
first: class default, the environment's own value, the profile's default, the environment's trainer suggestion, the
user's edit, the profile's lock. A field that the profile keeps takes no edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.contracts.config import ServerEntry, TrainerConfig
from hermes_rl_mcp.contracts.environments import EnvironmentSchema, FieldInfo, Section
from hermes_rl_mcp.contracts.profiles import Profile
from hermes_rl_mcp.errors import InvalidValueError, LockedFieldError, UnknownFieldError
from hermes_rl_mcp.redact import MASK, is_secret_name, redact_field
from hermes_rl_mcp.runs.configuration.fields import as_int, is_int, model_fields, sentence

GROUPS_PER_BATCH = 8
"""Groups in a batch when the environment leaves ``batch_size`` open (-1): the original's 128 sequences of 16."""
_SERVER_TEXT = {
    "model_name": "The model to train: a Hub id, a local folder, builtin:tiny or builtin:smollm2-135m.",
    "server_type": "Wire of the sampling endpoint.",
    "base_url": "Address of the sampling endpoint.",
    "api_key": "Key of the sampling endpoint.",
    "weight": "Share of requests this endpoint gets.",
    "num_requests_for_eval": "Requests in flight while evaluating.",
    "timeout": "Seconds one sampling request may take.",
}


@dataclass(frozen=True)
class ResolvedField:
    """One name of the namespace. ``sections`` are all parts of config.yaml that its value goes to."""

    info: FieldInfo
    sections: frozenset[Section]
    default: JsonValue
    """Before edits and locks."""
    value: JsonValue
    """What a run started now would use; for a managed field the sentence that says who sets it."""
    locked: bool
    managed: bool = False
    ceiling: float | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shown(self) -> JsonValue:
        """``value`` as an agent may see it: secrets masked. The sentence of a managed field is none."""
        return self.value if self.managed else redact_field(self.name, self.value)


@dataclass(frozen=True)
class Resolution:
    """Everything an environment can be told now, by field name."""

    schema: EnvironmentSchema
    profile: Profile
    edits: Mapping[str, JsonValue]
    fields: dict[str, ResolvedField]

    def field(self, name: str) -> ResolvedField:
        """Raises UnknownFieldError."""
        try:
            return self.fields[name]
        except KeyError:
            raise UnknownFieldError(name, sorted(self.fields)) from None

    def editable(self, name: str) -> ResolvedField:
        """Raises UnknownFieldError or LockedFieldError."""
        found = self.field(name)
        if found.locked:
            raise LockedFieldError(name, found.shown)
        return found

    @property
    def values(self) -> dict[str, JsonValue]:
        """All values except those that only the launcher knows."""
        return {name: field.value for name, field in self.fields.items() if not field.managed}

    @property
    def model_name(self) -> str:
        return str(self.fields["model_name"].value)

    def section(self, section: Section) -> dict[str, JsonValue]:
        """Values for one part of config.yaml, without managed ones and without fields that are simply unset. A secret
        that the environment's source holds (here only a mask) is left to the environment."""
        return {
            name: field.value
            for name, field in self.fields.items()
            if section in field.sections
            and not field.managed
            and (field.value is not None or name in self.edits)
            and not (field.value == MASK and is_secret_name(name))
        }

    def trainer_config(self) -> TrainerConfig:
        """Raises InvalidValueError if a lock or default does not fit TrainerConfig."""
        try:
            return TrainerConfig.model_validate(self.section("trainer"))
        except ValidationError as error:
            raise InvalidValueError(
                f"The trainer's settings do not fit together: {sentence(error)}.",
                hint="Change one of them with rl_edit_config.",
            ) from error


def resolve(schema: EnvironmentSchema, profile: Profile, edits: Mapping[str, JsonValue]) -> Resolution:
    """Never fails: values that do not fit are found by ``problems`` and at start."""
    sections: dict[str, set[Section]] = {}
    infos: dict[str, FieldInfo] = {}
    for info in [*schema.fields, *_server_fields(schema), *model_fields(TrainerConfig, "trainer")]:
        sections.setdefault(info.name, set()).add(info.section)
        infos.setdefault(info.name, info)
    fields: dict[str, ResolvedField] = {}
    for name, info in infos.items():
        default = _default(info, sections[name], schema, profile)
        managed = name in profile.managed
        value = default if name in profile.kept else edits.get(name, default)
        if managed:
            value = profile.managed[name]
        elif name in profile.locked:
            value = profile.locked[name]
        ceiling = profile.ceilings.get(name)
        locked = name in profile.locked_names()
        fields[name] = ResolvedField(
            info, frozenset(sections[name]), default, value, locked, managed, None if locked else ceiling
        )
    _fill_batch_size(fields, profile)
    return Resolution(schema, profile, dict(edits), fields)


def _default(info: FieldInfo, sections: set[Section], schema: EnvironmentSchema, profile: Profile) -> JsonValue:
    value = info.default
    if info.name in profile.defaults:
        value = profile.defaults[info.name]
    if "trainer" in sections and info.name in schema.trainer_defaults:
        value = schema.trainer_defaults[info.name]
    ceiling = profile.ceilings.get(info.name)
    if ceiling is not None and isinstance(value, int | float) and value > ceiling:
        value = int(ceiling) if isinstance(value, int) else ceiling
    return value


def _fill_batch_size(fields: dict[str, ResolvedField], profile: Profile) -> None:
    """-1 means that the environment leaves it open: take several whole groups, below the ceiling."""
    batch, group = fields.get("batch_size"), fields.get("group_size")
    if batch is None or group is None or batch.value != -1 or not is_int(group.value):
        return
    size = as_int(group.value)
    ceiling = profile.ceilings.get("batch_size")
    groups = GROUPS_PER_BATCH if ceiling is None or size < 1 else max(1, min(GROUPS_PER_BATCH, int(ceiling) // size))
    value = max(size, 1) * groups
    default = value if batch.default == -1 else batch.default
    fields["batch_size"] = ResolvedField(
        batch.info, batch.sections, default, value, batch.locked, batch.managed, batch.ceiling
    )


def _server_fields(schema: EnvironmentSchema) -> list[FieldInfo]:
    fields = []
    for info in model_fields(ServerEntry, "openai"):
        default = schema.server.get(info.name, info.default)
        fields.append(
            info.model_copy(update={"default": default, "description": _SERVER_TEXT.get(info.name, info.description)})
        )
    return fields

"""Command line and YAML to validated configs. Precedence: command line, then YAML, then ``config_init``.

Invariant: nothing that was given is ignored. A flag or key that no config knows is an error with the nearest names.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from hermes_rl_mcp.contracts.config import RunSection
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig
from hermes_rl_mcp.envs.hook_rules import place
from hermes_rl_mcp.envs.loading import defaults_of
from hermes_rl_mcp.envs.saying import found_wrong
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.redact import is_reference

COMMANDS = ("serve", "process", "evaluate", "compare", "describe", "check")
_COMMON = ("config", "slurm", "testing")
_PLAIN_OF: dict[str, tuple[str, ...]] = {
    **{"serve": _COMMON, "process": _COMMON, "evaluate": _COMMON, "compare": (*_COMMON, "seed")},
    **{"describe": ("output", "values"), "check": (*_COMMON, "output", "sample", "fingerprint", "longest")},
}
"""Flags without a section that a command takes."""
_PLAIN = tuple(dict.fromkeys(name for names in _PLAIN_OF.values() for name in names))

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Flags:
    """The command line, split but not yet validated: every value is still text."""

    command: str
    sections: dict[str, dict[str, str]] = field(default_factory=lambda: {"env": {}, "openai": {}})
    plain: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What one process works with."""

    config: BaseEnvConfig
    servers: list[APIServerConfig]
    run: RunSection | None
    run_dir: Path | None
    """The folder of the config file, when the file belongs to a run."""
    slurm: bool
    testing: bool


def parse_flags(arguments: Sequence[str]) -> Flags:
    """``COMMAND`` and ``--flag value`` or ``--flag=value`` in any order. A value may begin with one dash (-1)."""
    commands = []
    flags = Flags("")
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            commands.append(word)
            continue
        name, given, value = word[2:].partition("=")
        if not given:
            if not rest or rest[0].startswith("--"):
                raise InvalidValueError(f"--{name} needs a value.", hint=f"Booleans too: --{name} true")
            value = rest.pop(0)
        section, dot, key = name.partition(".")
        if dot and section in flags.sections:
            flags.sections[section][key] = value
        elif not dot and name in _PLAIN:
            flags.plain[name] = value
        else:
            known = [f"--{plain}" for plain in _PLAIN]
            raise InvalidValueError(f"Unknown flag --{name}.", hint=_nearest(f"--{name}", known, "--env.X, --openai.X"))
    if len(commands) != 1 or commands[0] not in COMMANDS:
        raise InvalidValueError(
            f"Expected one command of {', '.join(COMMANDS)}; found {' '.join(commands) or 'none'}.",
            hint="For example: FILE.py process --env.total_steps 2",
        )
    _refuse_unused(commands[0], flags)
    return Flags(commands[0], flags.sections, flags.plain)


def _refuse_unused(command: str, flags: Flags) -> None:
    """What a command would not look at."""
    takes = _PLAIN_OF[command]
    unused = [f"--{name}" for name in flags.plain if name not in takes]
    if command == "describe":
        unused += [f"--{section}.{key}" for section, keys in flags.sections.items() for key in keys]
    if unused:
        raise InvalidValueError(
            f"{command} does not take {', '.join(unused)}.",
            hint=f"It takes {', '.join(f'--{name}' for name in takes)}"
            + ("." if command == "describe" else ", --env.X and --openai.X."),
        )


def resolve(environment: type[BaseEnv], flags: Flags, forced: Mapping[str, Any] | None = None) -> Options:
    """Everything together. ``forced`` are a command's own defaults: over ``config_init``, under YAML and flags."""
    default, default_servers = defaults_of(environment)
    try:
        return _resolved(default, default_servers, flags, forced or {})
    except InvalidValueError as error:
        raise InvalidValueError(f"{error.message} ({place(environment)})", hint=error.hint) from error


def _resolved(
    default: BaseEnvConfig, default_servers: Sequence[APIServerConfig], flags: Flags, forced: Mapping[str, Any]
) -> Options:
    path = Path(flags.plain["config"]).expanduser().absolute() if "config" in flags.plain else None
    document = _read_yaml(path) if path else {}
    config_class = type(default)
    given = {**_mapping(document, "env"), **_typed(config_class, "env", flags.sections["env"])}
    given = {name: _from_variable(name, value) for name, value in given.items()}
    config = _validated(config_class, "env", {**_plain_values(default), **forced, **given})
    run = _run_section(document, path)
    return Options(
        config=config,
        servers=_servers(default_servers, document.get("openai"), flags.sections["openai"]),
        run=run,
        run_dir=path.parent if run and path else None,
        slurm=_switch(flags, document, "slurm"),
        testing=_switch(flags, document, "testing"),
    )


def _from_variable(name: str, value: Any) -> Any:
    """The secret that ``$HERMES_RL_SECRET_JUDGE`` names. Only such variables, so that a configuration that somebody
    else wrote cannot ask for this machine's other keys."""
    if isinstance(value, dict):
        return {key: _from_variable(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_variable(name, item) for item in value]
    if not is_reference(value):
        return value
    variable = str(value)[1:]
    if variable not in os.environ:
        raise InvalidValueError(
            f"{name} names the variable {variable}, which is not set.", hint=f"Run: hermes-rl config set {variable} -"
        )
    return os.environ[variable]


def _servers(default: Sequence[APIServerConfig], section: Any, flags: Mapping[str, str]) -> list[APIServerConfig]:
    """A YAML list decides how many there are; each entry, or the one mapping, lies over the default's."""
    defaults = list(default) or [APIServerConfig()]
    if section is None or isinstance(section, dict):
        pairs = [(one, section or {}) for one in defaults]
    elif isinstance(section, list) and section and all(isinstance(entry, dict) for entry in section):
        pairs = [(defaults[min(i, len(defaults) - 1)], entry) for i, entry in enumerate(section)]
    else:
        raise InvalidValueError("Section 'openai' of the config file must be a mapping or a list of mappings.")
    return [
        _validated(type(base), "openai", {**_plain_values(base), **entry, **_typed(type(base), "openai", flags)})
        for base, entry in pairs
    ]


def _typed(model: type[BaseModel], section: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Text to values: as YAML if the field takes that, else as it stands (so that a str field keeps "123")."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in model.model_fields:
            hint = _nearest(name, list(model.model_fields), "")
            raise InvalidValueError(f"Unknown flag --{section}.{name}.", hint=hint)
        values[name] = _value(model, name, text)
    return values


def _value(model: type[BaseModel], name: str, text: str) -> Any:
    try:
        parsed = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    info = model.model_fields[name]
    annotation: Any = info.annotation
    try:
        TypeAdapter(annotation).validate_python(parsed)
    except ValidationError:
        return text
    return parsed


def _validated(model: type[M], section: str, values: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        hint = ""
        if first["type"] == "extra_forbidden":
            hint = _nearest(name, list(model.model_fields), "")
        raise InvalidValueError(f"{section}{'.' if name else ''}{name}: {found_wrong(first)}.", hint=hint) from None


def _plain_values(config: BaseModel) -> dict[str, Any]:
    return {name: getattr(config, name) for name in type(config).model_fields}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValueError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"The config file {path} is not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidValueError(f"The config file {path} must hold a mapping with a section 'env'.")
    return document


def _mapping(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name) or {}
    if not isinstance(section, dict):
        raise InvalidValueError(f"Section '{name}' of the config file must be a mapping.")
    return section


def _run_section(document: Mapping[str, Any], path: Path | None) -> RunSection | None:
    if path is None or "run" not in document:
        return None
    return _validated(RunSection, "run", _mapping(document, "run"))


def _switch(flags: Flags, document: Mapping[str, Any], name: str) -> bool:
    value = flags.plain.get(name, document.get(name, False))
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError as error:
        raise InvalidValueError(f"{name} must be true or false, found {value!r}.") from error


def _nearest(name: str, known: Sequence[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join([*known, otherwise] if otherwise else known)}."

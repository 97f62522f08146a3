"""Turns flags, variables, ``$HERMES_HOME/.env`` and the settings file into Settings. The agent has no part in it.

MCP clients pass almost no environment to a server, so keys and paths may lie in ``$HERMES_HOME/.env``; a variable
that the process really has wins over that file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from pydantic import JsonValue

from hermes_rl_mcp.contracts.profiles import PROFILES, Profile
from hermes_rl_mcp.contracts.settings import (
    KNOWN_MODELS,
    OPENROUTER_KEY,
    OPENROUTER_URL,
    InferenceEndpoint,
    OperatorLimits,
    Settings,
)
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.interpreters import ATROPOS_PYTHON, atropos_python
from hermes_rl_mcp.operations.options import Flags, Given, given, split_commas
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.addresses import hosts_of
from hermes_rl_mcp.runs.configuration.checks import check_host

log = logging.getLogger(__name__)

INFERENCE_KEY = "HERMES_RL_INFERENCE_API_KEY"
_LAUNCHER_FIELDS = {"rollout_server_url", "base_url", "api_key", "checkpoint_dir"}
"""Nobody can unlock these: each run has its own addresses and its own folder."""
_SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


@dataclass(frozen=True)
class Operator:
    """The settings, and the environment variables that children are chosen from."""

    settings: Settings
    environ: Mapping[str, str] = field(repr=False)  # holds keys
    given: Given = field(repr=False)
    """For what is no setting of the operations: how the server is reached."""

    @property
    def home(self) -> Home:
        return Home(Path(self.settings.home), self.settings.session)


def load_settings(environ: Mapping[str, str], flags: Flags = Flags()) -> Operator:
    """Raises InvalidValueError for a flag, a variable or a line of a file that makes no sense."""
    home = Home.from_environ(environ)
    merged = effective_environ(home, environ)
    found = given(home, merged, flags)
    session = found.text("session") or "session"
    if not _SESSION_NAME.match(session):
        raise InvalidValueError(
            f"--session {session!r} cannot be a file name.", hint="Use letters, digits, '.', '_' and '-'."
        )
    python = found.text("atropos_python")
    if python:
        merged[ATROPOS_PYTHON] = python  # children are told by environment
        atropos_python(merged)
    settings = Settings(
        home=str(home.root),
        session=session,
        profile=_profile(found),
        env_dirs=_folders(found.texts("env_dirs")),
        data_dirs=_folders(found.texts("data_dirs")),
        atropos_python=python or None,
        limits=_limits(found),
        inference=_inference(merged),
        read_only=found.on("read_only"),
        tools=found.texts("tools") or None,
        exclude_tools=found.texts("exclude_tools"),
    )
    return Operator(settings, merged, found)


def _limits(found: Given) -> OperatorLimits:
    texts = {name: found.text(name) for name in OperatorLimits.model_fields}
    return OperatorLimits(**{name: _ceiling(name, text) for name, text in texts.items() if text})


def check_ceiling(variable: str, text: str) -> None:
    """Refuse a ceiling that no server would start with; other variables pass."""
    for name in OperatorLimits.model_fields:
        if variable == f"HERMES_RL_{name.upper()}":
            _ceiling(name, text)


def _ceiling(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        variable = f"HERMES_RL_{name.upper()}"
        raise InvalidValueError(
            f"{variable} (--{name.replace('_', '-')}) = {text!r} is not a number above 0.",
            hint=f"Give a number, or leave it out for no ceiling (in .env: hermes-rl config unset {variable}).",
        )
    return value


def effective_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """What counts: the home's ``.env``, over it the variables that the process has, and ``HERMES_RL_PATH`` before PATH,
    because clients start a server with a PATH of their own."""
    merged = {**_env_file(home.env_file), **environ}
    if further := merged.get("HERMES_RL_PATH"):
        merged["PATH"] = os.pathsep.join([further, *([merged["PATH"]] if merged.get("PATH") else [])])
    return merged


def _env_file(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} cannot be read: {error}.", hint="Repair it or move it away.") from error
    from dotenv import dotenv_values  # only where there is such a file: the server must start fast

    if mode & 0o077:
        log.warning("%s can be read by other users (mode %o); run: chmod 600 %s", path, mode, path)
    return {name: value for name, value in dotenv_values(stream=StringIO(text), interpolate=False).items() if value}


def _profile(found: Given) -> Profile:
    name = found.text("profile") or "local"
    if name not in PROFILES:
        raise InvalidValueError(f"Unknown profile '{name}'.", hint=f"Choose one of: {', '.join(sorted(PROFILES))}.")
    profile = PROFILES[name].model_copy(deep=True)
    profile.allowed_models.extend(found.texts("allow_models"))
    profile.allowed_hosts.extend(split_commas(found.environ.get("HERMES_RL_ALLOW_HOSTS", "")))
    for unlocked in found.texts("unlock"):
        _unlock(profile, unlocked)
    for pair in found.texts("lock"):
        locked, separator, text = pair.partition("=")
        if not separator or not locked.strip():
            raise InvalidValueError(f"--lock {pair!r} is not NAME=VALUE.", hint="Write --lock total_steps=200.")
        if locked.strip() in profile.managed:
            raise InvalidValueError(
                f"'{locked.strip()}' is set by the launcher and cannot be locked to a value.", hint="Leave it out."
            )
        profile.locked[locked.strip()] = _value(text.strip())
    return profile


def _unlock(profile: Profile, name: str) -> None:
    if name in _LAUNCHER_FIELDS:
        raise InvalidValueError(
            f"'{name}' cannot be unlocked: the launcher sets it for each run.", hint="Leave it out."
        )
    if name in profile.locked:
        profile.defaults[name] = profile.locked.pop(name)
    elif name in profile.managed:
        del profile.managed[name]
    elif name in profile.kept:
        profile.kept.remove(name)
    else:
        raise InvalidValueError(
            f"--unlock {name}: profile '{profile.name}' does not lock this field.",
            hint=f"Locked are: {', '.join(sorted(profile.locked_names()))}.",
        )


def _inference(environ: Mapping[str, str]) -> InferenceEndpoint | None:
    """The endpoint that is set, or OpenRouter if its key is there, or none: ``local`` says that it shall be none."""
    base_url = environ.get("HERMES_RL_INFERENCE_BASE_URL", "").strip()
    models = split_commas(environ.get("HERMES_RL_INFERENCE_MODEL", ""))
    variable = INFERENCE_KEY if environ.get(INFERENCE_KEY) else "OPENAI_API_KEY"
    if base_url == "local":
        return None
    if not base_url:
        if not environ.get(OPENROUTER_KEY):
            return None
        base_url = environ.get("OPENROUTER_BASE_URL", "").strip() or OPENROUTER_URL
        models, variable = models or list(KNOWN_MODELS), OPENROUTER_KEY
    if not base_url.startswith(("http://", "https://")):
        raise InvalidValueError(
            f"HERMES_RL_INFERENCE_BASE_URL={base_url!r} is not an http address.",
            hint="Set it to http://HOST:PORT/v1, or to 'local' for the local model.",
        )
    for host in hosts_of(base_url):
        check_host("HERMES_RL_INFERENCE_BASE_URL", host)
    if not models:
        raise InvalidValueError(
            "HERMES_RL_INFERENCE_BASE_URL is set but HERMES_RL_INFERENCE_MODEL is not.",
            hint="Set it to the model's name at that endpoint.",
        )
    return InferenceEndpoint(
        base_url=base_url.rstrip("/"), model_name=models[0], further_models=models[1:], api_key_variable=variable
    )


def _folders(names: Sequence[str]) -> list[str]:
    return [str(Path(name).expanduser().absolute()) for name in names if name.strip()]


def _value(text: str) -> JsonValue:
    try:
        parsed: JsonValue = json.loads(text)
    except ValueError:
        return text
    return parsed

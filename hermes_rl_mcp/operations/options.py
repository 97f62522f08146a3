"""Every setting of the person who starts the server, each in three ways: a flag, a variable, a key of a file.

The first that gives it wins: the flag, the variable of the process, the variable in ``$HERMES_HOME/.env``, the key of
the settings file (``$HERMES_HOME/rl/server.yaml`` or ``--config FILE``). One table, so that no setting lacks a way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.files import NotAFileError, read_file
from hermes_rl_mcp.paths import Home

_YES, _NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def split_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def split_folders(text: str) -> list[str]:
    return [part for part in text.split(os.pathsep) if part.strip()]


def split_pairs(text: str) -> list[str]:
    """``a=1,b=[1,2]``: a comma separates only before the next NAME=."""
    return [part for part in re.split(r",(?=\s*[A-Za-z_]\w*=)", text) if part.strip()]


@dataclass(frozen=True)
class Option:
    """One setting. ``name`` is its key in the file and its attribute of ``Flags``."""

    name: str
    what: str
    metavar: str = "TEXT"
    flag: str = ""
    """Default: ``--`` and the name with dashes."""
    split: Callable[[str], list[str]] | None = None
    """How a variable's text becomes the values of a flag that can be repeated; None: there is one value."""
    switch: bool = False
    in_file: bool = True

    @property
    def variable(self) -> str:
        return f"HERMES_RL_{self.name.upper()}"

    @property
    def flag_name(self) -> str:
        return self.flag or f"--{self.name.replace('_', '-')}"


OPTIONS = (
    Option("config", "settings file; default rl/server.yaml in $HERMES_HOME", "FILE", in_file=False),
    Option("profile", "local or hermes: what is locked", "NAME"),
    Option("env_dirs", "folder with environments; repeatable", "FOLDER", "--env-dir", split_folders),
    Option(
        *("data_dirs", "folder whose data sets the agent may look into; repeatable", "FOLDER", "--data-dir"),
        split=split_folders,
    ),
    Option("atropos_python", "Python that runs environments written for Atropos", "FILE"),
    Option("session", "name of the selection shared by clients", "NAME"),
    Option("lock", "lock a field to a value; repeatable", "NAME=VALUE", split=split_pairs),
    Option("unlock", "unlock a field; repeatable", "NAME", split=split_commas),
    Option("allow_models", "let the agent choose these models; repeatable", "PATTERN", "--allow-model", split_commas),
    Option("max_hours", "refuse a run that is estimated to take more hours", "N"),
    Option("max_disk_gib", "refuse a run that is estimated to take more GiB of disk", "N"),
    Option("max_gpu_memory_gib", "refuse a run that is estimated to take more GiB of GPU memory", "N"),
    Option("ask_hours", "ask a person before a run that is estimated to take more hours", "N"),
    Option("ask_disk_gib", "ask a person before a run that is estimated to take more GiB of disk", "N"),
    Option("ask_gpu_memory_gib", "ask a person before a run that is estimated to take more GiB of GPU memory", "N"),
    Option("read_only", "offer only tools that change nothing; wins over every other choice of tools", switch=True),
    Option("tools", "offer only these tools, separated by commas; repeatable", "NAMES", split=split_commas),
    Option("exclude_tools", "do not offer these tools, separated by commas; repeatable", "NAMES", split=split_commas),
    Option("transport", "stdio (default), or sse or streamable-http: one HTTP server for both, /sse and /mcp", "NAME"),
    Option("host", "address to listen on, default 127.0.0.1; any that is not loopback needs a token", "ADDRESS"),
    Option("port", "default 8765; 0 takes a free one", "N"),
    Option("token_file", "file with the token that every HTTP request must bear (or HERMES_RL_TOKEN)", "FILE"),
    Option(
        *("accept_hosts", "further Host header to answer to, NAME or NAME:PORT; repeatable", "NAME", "--accept-host"),
        split=split_commas,
    ),
    Option(
        *("accept_origins", "further web origin whose pages may call, SCHEME://NAME[:PORT]; repeatable", "ORIGIN"),
        *("--accept-origin", split_commas),
    ),
    Option("log_file", "write the server's log there, too; kept below 2 x 5 MB", "FILE"),
)
"""What a person finds in ``hermes-rl-mcp --help``, in this order."""

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Flags:
    """What the command line gave; None and empty mean "not given". One field for each option."""

    config: str | None = None
    profile: str | None = None
    env_dirs: Sequence[str] = ()
    data_dirs: Sequence[str] = ()
    atropos_python: str | None = None
    session: str | None = None
    lock: Sequence[str] = ()
    unlock: Sequence[str] = ()
    allow_models: Sequence[str] = ()
    max_hours: str | None = None
    max_disk_gib: str | None = None
    max_gpu_memory_gib: str | None = None
    ask_hours: str | None = None
    ask_disk_gib: str | None = None
    ask_gpu_memory_gib: str | None = None
    read_only: bool = False
    tools: Sequence[str] = ()
    exclude_tools: Sequence[str] = ()
    transport: str | None = None
    host: str | None = None
    port: str | None = None
    token_file: str | None = None
    accept_hosts: Sequence[str] = ()
    accept_origins: Sequence[str] = ()
    log_file: str | None = None


@dataclass(frozen=True)
class Given:
    """Answers, option by option, what was given: nothing at all reads as empty."""

    flags: Flags
    environ: Mapping[str, str] = field(repr=False)  # holds keys
    file: Mapping[str, Any] = field(default_factory=dict)
    """Of the settings file, by option name; values as ``read_settings`` checked them."""

    def text(self, name: str) -> str:
        """The value of an option that has one, without blanks around it; empty if not given."""
        flag = getattr(self.flags, name)
        return str(flag or self.environ.get(BY_NAME[name].variable, "") or self.file.get(name, "")).strip()

    def texts(self, name: str) -> list[str]:
        """The values of an option that can have several."""
        split = BY_NAME[name].split
        assert split is not None
        values: Sequence[str] = getattr(self.flags, name)
        if values and split is split_commas:  # --tools a,b is --tools a --tools b
            values = [part for value in values for part in split_commas(value)]
            if not values:  # an empty shell variable, say: with --tools nothing would mean everything
                raise InvalidValueError(
                    f"{BY_NAME[name].flag_name} is empty.", hint="Give it a value, or leave it out."
                )
        return list(values or split(self.environ.get(BY_NAME[name].variable, "")) or self.file.get(name, ()))

    def on(self, name: str) -> bool:
        """Whether a switch is on. Raises InvalidValueError for a variable that is neither yes nor no."""
        variable = BY_NAME[name].variable
        text = self.environ.get(variable, "").strip().lower()
        if text not in _YES | _NO:
            raise InvalidValueError(f"{variable}={text!r} is neither yes nor no.", hint="Use 1 or 0.")
        return bool(getattr(self.flags, name)) or (text in _YES if text else bool(self.file.get(name, False)))


def given(home: Home, environ: Mapping[str, str], flags: Flags) -> Given:
    """With the settings file read. Raises InvalidValueError for one that makes no sense."""
    named = flags.config or environ.get(BY_NAME["config"].variable, "").strip()
    path = Path(named).expanduser().absolute() if named else home.settings_file
    return Given(flags, environ, read_settings(path, must_exist=bool(named)))


def read_settings(path: Path, *, must_exist: bool) -> dict[str, Any]:
    """Option name to text, texts or bool. An unknown key is an error: a limit with a typing error must not be none."""
    try:
        data = read_file(path, inside=path.parent)
    except FileNotFoundError:
        if must_exist:
            raise InvalidValueError(f"The settings file {path} does not exist.", hint="Check --config.") from None
        return {}
    except (NotAFileError, OSError) as error:
        raise InvalidValueError(f"The settings file cannot be read: {error}.", hint="Repair or remove it.") from error
    import yaml  # only where there is such a file: the server must start fast

    try:
        loaded = yaml.safe_load(data)
        keys = _keys(yaml.compose(data, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"{path} is not YAML: {error}", hint="Repair or remove it.") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InvalidValueError(f"{path} is not a list of settings.", hint="One 'name: value' a line.")
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise InvalidValueError(f"{path}: '{twice[0]}' stands there twice.", hint="Remove one of the two.")
    return {str(key): _checked(path, str(key), value) for key, value in loaded.items() if value is not None}


def _keys(node: Any) -> list[str]:
    """Of a YAML mapping, as often as they stand there: a loader keeps the last of two without a word."""
    return [str(key.value) for key, _ in node.value] if node is not None and node.id == "mapping" else []


def _checked(path: Path, key: str, value: Any) -> Any:
    option = BY_NAME.get(key)
    if option is None or not option.in_file:
        known = ", ".join(option.name for option in OPTIONS if option.in_file)
        raise InvalidValueError(f"{path}: there is no setting '{key}'.", hint=f"There are: {known}.")
    if option.switch:
        if isinstance(value, bool):
            return value
        raise InvalidValueError(f"{path}: {key} must be true or false, not {value!r}.", hint=f"Write {key}: true.")
    if option.split is None:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise InvalidValueError(f"{path}: {key} must be one value, not {value!r}.", hint=f"Write {key}: VALUE.")
    if isinstance(value, dict) and option.split is split_pairs:
        return [f"{name}={_as_json(item)}" for name, item in value.items()]
    items = value if isinstance(value, list) else [value]
    if not items:
        raise InvalidValueError(f"{path}: {key} is an empty list.", hint="Give it a value, or leave it out.")
    if not all(isinstance(item, str) for item in items):
        raise InvalidValueError(f"{path}: {key} must be a list of texts, not {value!r}.", hint=f"Write {key}: [A, B].")
    return items


def _as_json(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)

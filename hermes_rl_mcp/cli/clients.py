"""MCP clients: where each keeps its list of servers, and what has to stand there to start ours.

Invariant: every path is absolute and no secret is in an entry. Clients start a server in a folder of their own, with
almost no environment; keys belong into ``$HERMES_HOME/.env``, which the server reads.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from hermes_rl_mcp.cli.config import secret_like
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations.options import OPTIONS
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.redact import redact_text

COMMAND = "hermes-rl-mcp"
FOR_CHILDREN = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy", "SSL_CERT_FILE"),
)
"""Settings of a run that a client does not pass on."""
KEYS = (
    *("HF_TOKEN", "WANDB_API_KEY", "HERMES_RL_INFERENCE_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY"),
    "TINKER_API_KEY",
)
"""Secrets of services, by name."""
_OF_HTTP = ("transport", "host", "port", "token_file", "accept_hosts", "accept_origins")
_FOR_US = (
    *(option.variable for option in OPTIONS if option.name not in _OF_HTTP),
    *("HERMES_RL_ALLOW_HOSTS", "HERMES_RL_INFERENCE_BASE_URL", "HERMES_RL_INFERENCE_MODEL"),
    *("HERMES_RL_INFERENCE_TIMEOUT_S", "OPENROUTER_BASE_URL"),
    *("HERMES_RL_PATH", "HERMES_RL_CLAIMS_DIR"),
)
_FILES_AND_FOLDERS = [option for option in OPTIONS if option.metavar in ("FILE", "FOLDER")]
_PATH_FLAGS = {option.flag_name for option in _FILES_AND_FOLDERS}
_PATH_VARIABLES = {option.variable for option in _FILES_AND_FOLDERS} | {
    *("HF_HOME", "HF_HUB_CACHE", "SSL_CERT_FILE", "LD_LIBRARY_PATH", "HERMES_RL_PATH", "HERMES_RL_CLAIMS_DIR")
}
"""Of one path, or several with the system's separator between them."""

Form = Literal["json", "jsonc", "yaml"]


@dataclass(frozen=True)
class Client:
    """One client's file: its form, and the name under which it lists servers."""

    title: str
    form: Form
    container: str
    typed: bool
    """Its entries say ``type: stdio``."""
    then: str
    """What makes it see a change."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further members of an entry."""


CLIENTS: Mapping[str, Client] = {
    "claude-desktop": Client("Claude Desktop", "json", "mcpServers", False, "Quit Claude Desktop and start it again."),
    "claude-code": Client("Claude Code", "json", "mcpServers", True, "It is there in new sessions; /mcp shows it."),
    "cursor": Client("Cursor", "json", "mcpServers", True, "Switch it on under Settings, MCP."),
    "hermes": Client(
        "Hermes",
        "yaml",
        "mcp_servers",
        False,
        "Start Hermes anew, or type /reload-mcp.",
        # a call takes 50 s at most, but a person who is asked something may take minutes
        {"timeout": 300, "connect_timeout": 60},
    ),
    "vscode": Client("VS Code", "jsonc", "servers", True, "Run the command: MCP: List Servers."),
    "inspector": Client("the MCP Inspector", "json", "mcpServers", True, "Start mcp-inspector."),
}


@dataclass(frozen=True)
class Surroundings:
    """What of this shell's variables an entry carries, and what it does not, as sentences."""

    variables: dict[str, str]
    left_out: list[str]


def client_file(name: str, environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where client ``name`` keeps the servers of its user."""
    home = Path(environ.get("HOME") or Path.home())
    if platform == "darwin":
        settings = home / "Library" / "Application Support"
    else:
        settings = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    claude_code = environ.get("CLAUDE_CONFIG_DIR")
    files = {
        "claude-desktop": settings / "Claude" / "claude_desktop_config.json",
        "claude-code": Path(claude_code or home) / ".claude.json",
        "cursor": home / ".cursor" / "mcp.json",
        "hermes": Home.from_environ(environ).root / "config.yaml",
        "vscode": settings / "Code" / "User" / "mcp.json",
        "inspector": Path(environ.get("MCP_CATALOG_PATH") or home / ".mcp-inspector" / "mcp.json"),
    }
    return files[name].expanduser().absolute()


def server_command() -> list[str]:
    """The server of this installation: its command, or without one this Python and its arguments."""
    beside = Path(sys.executable).parent / COMMAND
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(COMMAND)
    return [os.path.abspath(found)] if found else [os.path.abspath(sys.executable), "-P", "-m", "hermes_rl_mcp.server"]


def entry(client: Client, variables: Mapping[str, str], flags: Sequence[str]) -> dict[str, JsonValue]:
    """What starts our server, as ``client`` wants it written. The transport is named: a setting may say another one.

    Raises InvalidValueError for flags that the server does not have, or that no client can start it with.
    """
    _check_flags(flags)
    command, *arguments = server_command()
    kind: dict[str, JsonValue] = {"type": "stdio"} if client.typed else {}
    return {
        **kind,
        "command": command,
        "args": [*arguments, "--transport", "stdio", *absolute_flags(flags)],
        "env": dict(variables),
        **client.settings,
    }


def surroundings(environ: Mapping[str, str], in_file: Mapping[str, str]) -> Surroundings:
    """``HERMES_HOME``, and the settings of this shell that a server started by a client would not have."""
    home = Home.from_environ(environ)
    variables = {"HERMES_HOME": str(home.root)}
    left_out = []
    for name in sorted(environ):
        value = environ[name]
        if not value or name not in (*FOR_CHILDREN, *_FOR_US, *KEYS):
            continue
        if name in in_file:
            if in_file[name] != value:
                left_out.append(f"{name} is not the same in this shell and in {home.env_file}, which the client gets.")
        elif secret_like(name) or redact_text(value) != value:
            left_out.append(f"{name} holds a secret, so it is not written; run: hermes-rl config set {name} -")
        else:
            variables[name] = _absolute(value) if name in _PATH_VARIABLES else value
    return Surroundings(variables, left_out)


def _check_flags(flags: Sequence[str]) -> None:
    known = {option.flag_name: option for option in OPTIONS}
    for name in [flag.partition("=")[0] for flag in flags if flag.startswith("-")]:
        if name not in known:
            raise InvalidValueError(f"{COMMAND} has no flag {name}.", hint=f"{COMMAND} --help lists them.")
        if known[name].name in _OF_HTTP:
            raise InvalidValueError(
                f"{name} is for a server over HTTP.", hint=f"Start that yourself: {COMMAND} {' '.join(flags)}"
            )


def absolute_flags(flags: Sequence[str]) -> list[str]:
    """Flags of the server with absolute paths: the client starts it elsewhere."""
    made: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if equals and name in _PATH_FLAGS:
            made.append(f"{name}={_absolute_path(value)}")
        else:
            made.append(_absolute_path(flag) if made and made[-1] in _PATH_FLAGS else flag)
    return made


def _absolute(paths: str) -> str:
    return os.pathsep.join(_absolute_path(path) for path in paths.split(os.pathsep) if path)


def _absolute_path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))

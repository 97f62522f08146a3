"""The command line of ``hermes-rl-mcp``, made from the table of options, and what it says of how to reach the server.

Invariant: an address that other machines can reach is never served without a token.
"""

from __future__ import annotations

import argparse
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl_mcp import __version__
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.loopback import is_loopback, port_number
from hermes_rl_mcp.operations.options import OPTIONS, Flags, Given

TRANSPORTS = ("stdio", "sse", "streamable-http")
TOKEN = "HERMES_RL_TOKEN"
_MIN_TOKEN_CHARS = 16
_NEW_TOKEN = "Make one: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


@dataclass(frozen=True)
class Serving:
    """How clients reach the server."""

    transport: str
    host: str
    port: int
    token: str | None = field(repr=False)
    accept_hosts: tuple[str, ...] = ()
    accept_origins: tuple[str, ...] = ()
    log_file: Path | None = None


def parser() -> argparse.ArgumentParser:
    """One flag for each option; none has a default, so that what was not given is known."""
    made = argparse.ArgumentParser(
        prog="hermes-rl-mcp",
        usage="hermes-rl-mcp [flags]",
        description="MCP server that trains language models by reinforcement learning.",
        epilog="Every flag can also be a variable (HERMES_RL_NAME) or a key of $HERMES_HOME/rl/server.yaml, named in "
        "brackets. A flag wins over a variable, a variable over the file.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"hermes-rl-mcp {__version__}")
    for option in OPTIONS:
        where = f"({option.variable}{f'; {option.name}' if option.in_file else ''})"
        text = f"{option.what} {where}"
        if option.switch:
            made.add_argument(option.flag_name, dest=option.name, action="store_true", help=text)
        elif option.split is not None:
            made.add_argument(
                option.flag_name, dest=option.name, action="append", default=[], metavar=option.metavar, help=text
            )
        else:
            made.add_argument(option.flag_name, dest=option.name, metavar=option.metavar, help=text)
    return made


def flags_of(options: argparse.Namespace) -> Flags:
    return Flags(**{option.name: getattr(options, option.name) for option in OPTIONS})


def serving(given: Given) -> Serving:
    """Raises InvalidValueError for what makes no sense or would be open to strangers."""
    transport = given.text("transport") or "stdio"
    if transport not in TRANSPORTS:
        raise InvalidValueError(
            f"--transport {transport!r} is not one of {', '.join(TRANSPORTS)}.", hint="Choose one of these."
        )
    host = given.text("host") or "127.0.0.1"
    try:
        port = port_number(given.text("port") or "8765")
    except argparse.ArgumentTypeError as error:
        raise InvalidValueError(f"--port: {error}", hint="Give a number up to 65535; 0 takes a free one.") from None
    log_file = given.text("log_file")
    token = _token(given) if transport != "stdio" else None
    if transport != "stdio" and token is None and not is_loopback(host):
        raise InvalidValueError(
            f"--host {host} can be reached from other machines, and there is no token.",
            hint=f"Give --token-file FILE or {TOKEN}, or listen on loopback only (127.0.0.1). {_NEW_TOKEN}",
        )
    return Serving(
        transport=transport,
        host=host,
        port=port,
        token=token,
        accept_hosts=tuple(given.texts("accept_hosts")),
        accept_origins=tuple(given.texts("accept_origins")),
        log_file=Path(log_file).expanduser().absolute() if log_file else None,
    )


def _token(given: Given) -> str | None:
    """Of the file that a flag names, else of HERMES_RL_TOKEN, else of the file that a variable or a key names."""
    if given.flags.token_file or not (value := given.environ.get(TOKEN, "").strip()):
        name = given.text("token_file")
        return _checked(f"The token in {name}", _token_in(Path(name).expanduser())) if name else None
    return _checked(TOKEN, value)


def _token_in(path: Path) -> str:
    try:
        text = read_file(path, 4096, inside=path.parent).decode()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(f"The token file {path} cannot be read: {error}.", hint=_NEW_TOKEN) from error
    if mode & 0o077:
        raise InvalidValueError(
            f"The token file {path} can be read by other users (mode {mode:o}).", hint=f"Run: chmod 600 {path}"
        )
    return text.strip()


def _checked(what: str, token: str) -> str:
    if len(token) < _MIN_TOKEN_CHARS or not all("!" <= char <= "~" for char in token):
        raise InvalidValueError(
            f"{what} must be at least {_MIN_TOKEN_CHARS} characters without blanks.", hint=_NEW_TOKEN
        )
    return token


def secrets_of(serving: Serving, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the token in it, so that it is masked in every answer as other secrets are."""
    return {**environ, TOKEN: serving.token} if serving.token else dict(environ)

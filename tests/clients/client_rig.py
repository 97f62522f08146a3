"""Servers for clients, and clients in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served import product
from wire import Target

from hermes_rl_mcp.paths import install_root

TRANSPORTS = ("stdio", "sse", "streamable-http")
SERVER = ["-P", "-m", "hermes_rl_mcp.server"]
DRIVE = Path(__file__).with_name("drive.py")
OTHERS = install_root() / ".cache" / "clients"
"""A virtual environment for each other client, made by ``make clients``."""


def at(transport: str, address: str, environ: dict[str, str]) -> Target:
    """The server at ``address``, which speaks both kinds of HTTP; over stdio one of its own."""
    if transport == "stdio":
        return Target("stdio", command=sys.executable, args=SERVER, env=environ)
    return Target(transport, url=address + ("/sse" if transport == "sse" else "/mcp"))


@contextmanager
def served_over(transport: str, environ: dict[str, str], log: Path) -> Iterator[Target]:
    """A server for one client, started as people start it for this transport."""
    if transport == "stdio":
        yield at(transport, "", environ)
        return
    with product(environ, log, transport) as address:
        yield at(transport, address, environ)


def interpreter(client: str) -> Path:
    """Of the virtual environment with ``client`` in it."""
    return OTHERS / client / "bin" / "python"


def drive(python: Path, library: str, era: str, scenario: str, target: Target, timeout_s: float) -> dict[str, Any]:
    """Plays ``scenario`` through a client in a process of its own; what it says to stderr is in the error."""
    done = subprocess.run(
        [str(python), str(DRIVE), library, era, scenario],
        input=json.dumps(vars(target)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen

"""A server over HTTP for as long as a test needs it, for tests that bring a client of somebody else's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from leash import leash, leashed, on_leash

_START_S = 200
_END_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def listening(command: Sequence[str], port: int, environ: dict[str, str], log: Path) -> Iterator[None]:
    """``command`` from when it accepts connections; what it writes is in ``log``, and in the error if it ends early."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=leashed(environ),
            pass_fds=(leash(),),
        )
    try:
        deadline = time.monotonic() + _START_S
        while True:
            assert process.poll() is None, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                os.sched_yield()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()


@contextmanager
def product(environ: dict[str, str], log: Path, transport: str = "streamable-http") -> Iterator[str]:
    """The server as people start it. Gives ``http://127.0.0.1:PORT``."""
    port = free_port()
    flags = ["--transport", transport, "--port", str(port)]
    with listening(on_leash("hermes_rl_mcp.server", *flags), port, environ, log):
        yield f"http://127.0.0.1:{port}"

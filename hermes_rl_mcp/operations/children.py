"""Short-lived children that operations start: what they see of the environment, how they end, how many work at once.

A child never outlives its caller: it goes with its whole session at the deadline or when the call is cancelled, and it
watches a lifeline for the case that the server is killed.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.agent import settings as agent_settings
from hermes_rl_mcp.catalog.describe import end_session
from hermes_rl_mcp.files import make_private_dir
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.redact import SECRET_PREFIX
from hermes_rl_mcp.runs.locks import HeldLock, take
from hermes_rl_mcp.runs.specs import CHILD_COMMANDS, supervisor_environ

_FOR_TRAINING = ("WANDB_", SECRET_PREFIX, CHILD_COMMANDS, *agent_settings.KEYS)
"""Beginnings of names of variables."""
_STDERR_BYTES = 65_536
_POLL_S = 0.05


@dataclass(frozen=True)
class Finished:
    """How a child ended, and what it said."""

    code: int
    stdout: bytes
    last_line: str
    """Of stderr: the sentence of a traceback."""


def helper_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """For a child that runs environment code: hub access, but no W&B key. One thread, which waits without spinning."""
    chosen = {k: v for k, v in supervisor_environ(home, environ).items() if not k.startswith("WANDB_")}
    return {**chosen, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def program_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """For a program of the trainer that is no part of a run: what a run's trainer gets, but for what serves training
    alone."""
    chosen = supervisor_environ(home, environ)
    mine = {name: value for name, value in chosen.items() if not name.startswith(_FOR_TRAINING)}
    return {**mine, "OMP_WAIT_POLICY": "PASSIVE"}


async def run_helper(command: Sequence[str], environ: Mapping[str, str], *, cwd: Path, max_bytes: int) -> Finished:
    """Runs a program to its end. Of its stdout at most ``max_bytes`` are kept. Set a deadline around it."""
    out, errors = bytearray(), bytearray()
    with lifeline.held() as reading:
        process = await anyio.open_process(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, lifeline.VARIABLE: str(reading)},
            cwd=cwd,
            start_new_session=True,
            pass_fds=(reading,),
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_collect, process.stdout, out, max_bytes)
                tasks.start_soon(_collect, process.stderr, errors, _STDERR_BYTES)
                code = await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await end_session(process)
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return Finished(code, bytes(out), lines[-1] if lines else "")


@asynccontextmanager
async def turn(folder: Path, kind: str, places: int) -> AsyncIterator[None]:
    """At most ``places`` callers at once are inside, over all servers that share ``folder``; the others wait."""
    lock: HeldLock | None = None
    with suppress(OSError):  # a full disk: better too many at once than none
        make_private_dir(folder)
        while lock is None:
            for place in range(places):
                if lock := take(folder / f"{kind}-{place}.lock"):
                    break
            else:
                await anyio.sleep(_POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


async def _collect(stream: anyio.abc.ByteReceiveStream | None, kept: bytearray, max_bytes: int) -> None:
    """The rest is read as well, so that the child does not block on a full pipe. Of stderr the end matters."""
    assert stream is not None  # both are pipes
    async for chunk in stream:
        kept += chunk
        if len(kept) > max_bytes:
            del kept[:-max_bytes]

"""Runs a Python program that a model wrote: bounded in time, memory, files and output, without network where it can be.

It is no wall: the program runs as this user and can read what this user can read, files and other processes of the
user included. Invariant: when ``run_python`` returns, or its process ends in any way, the program, all it started and
its folder are gone; where the kernel gives no process namespace, all but what the program moved into a session of its
own.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.envs.rewards import confinement
from hermes_rl_mcp.errors import PreflightError

READ_BYTES = 65_536
MOST_READ_BYTES = 1 << 26
"""Kept of what is in the pipe at the end; the program's own bound is checked before."""
POLL_S = 0.02
"""Between two looks whether a program has ended whose output is still held open."""
DRAIN_S = 1.0
"""For what is still in the pipe after the group was killed."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    time_s: float = 5.0
    """Wall clock; processor time is bounded by the same, rounded up, for each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    output_bytes: int = 1 << 20
    """stdout and stderr together. The program is ended when it writes more."""
    file_bytes: int = 16 << 20
    """Of each file it writes."""
    processes: int = 32
    """Where the kernel gives it a namespace."""
    network: Literal["off", "required", "on"] = "off"
    """off: none where the kernel gives this user a namespace. required: run nothing where it does not. on: as it is."""


@dataclass(frozen=True)
class Execution:
    """What became of a program."""

    output: bytes
    """stdout and stderr as they came, up to the bound."""
    exit_code: int
    """As the program ended; minus the signal where the program was ended from here."""
    timed_out: bool = False
    too_much_output: bool = False

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.timed_out and not self.too_much_output


def run_python(source: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
    """Runs ``source`` as a script in an empty folder of its own. Blocks; call it in a thread.

    Raises PreflightError where ``network="required"`` asks for what the kernel does not give.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="hermes-rl-code-", ignore_cleanup_errors=True) as folder:
        script = Path(folder, "program.py")
        script.write_text(source, encoding="utf-8", errors="surrogatepass")
        given = Path(folder, "stdin")
        given.write_bytes(stdin)
        with lifeline.held() as fd, given.open("rb") as file:
            given.unlink()
            process = subprocess.Popen(
                _command(script, limits, fd),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
                pass_fds=[fd],
            )
            try:
                found = _followed(process, limits)
            finally:
                _end(process)
    if limits.network == "required" and found.exit_code == confinement.CANNOT_CONFINE:
        raise PreflightError(
            f"A program was not run: {found.output.decode(errors='replace').strip()}.",
            hint="Allow user namespaces, or set network to 'off'.",
        )
    return found


def _command(script: Path, limits: Limits, lifeline_fd: int) -> list[str]:
    numbers = (lifeline_fd, limits.memory_bytes, int(limits.time_s) + 1, limits.file_bytes, limits.processes)
    python = [sys.executable, "-I", "-S"]
    return [*python, str(confinement.__file__), *map(str, numbers), limits.network, *python, str(script)]


def _followed(process: subprocess.Popen[bytes], limits: Limits) -> Execution:
    """Until the program ends, its time is up or it has said too much; then its whole group is killed."""
    output = bytearray()
    deadline = time.monotonic() + limits.time_s
    ended = _read(process, output, deadline, lambda: len(output) > limits.output_bytes or _has_ended(process))
    too_much = len(output) > limits.output_bytes
    timed_out = not too_much and not ended and not _has_ended(process)
    _end(process, output)
    return Execution(bytes(output[: limits.output_bytes]), process.returncode, timed_out, too_much)


def _read(process: subprocess.Popen[bytes], output: bytearray, deadline: float, enough: Callable[[], bool]) -> bool:
    """Appends what comes, until there is enough or the deadline. False: the deadline came first."""
    assert process.stdout is not None
    open_pipe = True
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if open_pipe and selector.select(min(left_s, POLL_S)):
                chunk = os.read(process.stdout.fileno(), READ_BYTES)
                output += chunk
                open_pipe = bool(chunk)
            elif not open_pipe:
                time.sleep(min(left_s, POLL_S))  # closed its output and goes on
            if enough():
                return True
    return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without taking note of it, so that its number stays its own until the group was killed."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes], output: bytearray | None = None) -> None:
    """Kills the group, takes what is left in the pipe and waits until nobody holds it. Twice is fine."""
    if process.returncode is not None:
        return
    assert process.stdout is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = bytearray() if output is None else output
    deadline = time.monotonic() + DRAIN_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), READ_BYTES)
            if not chunk:
                break
            if len(left) < MOST_READ_BYTES:
                left += chunk
    process.stdout.close()

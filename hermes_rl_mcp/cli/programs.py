"""Programs of the trainer that a command starts, waits for, and does not outlive.

Invariant: the child gets the variables that a run's trainer would get, and ends when this process does, however that
ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.operations.children import program_environ
from hermes_rl_mcp.operations.context import Context

INTERRUPTED = 130


@contextmanager
def started(
    at: Context, module: str, arguments: Sequence[str], pass_fds: Sequence[int] = (), output: IO[bytes] | None = None
) -> Iterator[Program]:
    """``python -P -m MODULE``; see ``running``."""
    environ = program_environ(at.home, at.operator.environ)
    with running([sys.executable, "-P", "-m", module, *arguments], environ, pass_fds, output) as program:
        yield program


@contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = (), output: IO[bytes] | None = None
) -> Iterator[Program]:
    """A child with this process's terminal, or with all it says in ``output``. Ended, and waited for, when the block is
    left."""
    read_end, write_end = os.pipe()
    try:
        child = subprocess.Popen(
            list(command),
            env={**environ, lifeline.VARIABLE: str(read_end)},
            stdin=subprocess.DEVNULL,
            stdout=output or sys.stderr,  # ours is for the answer
            stderr=output,
            pass_fds=(read_end, *pass_fds),
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    program = Program(child)
    before = {number: signal.signal(number, program.signalled) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield program
    finally:
        program.end()
        os.close(write_end)
        for number, handler in before.items():
            signal.signal(number, handler)


class Program:
    """A child under way."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.interrupted = False
        """Ctrl-C or SIGTERM came; the child has got it, too."""

    def running(self) -> bool:
        return self._child.poll() is None

    def wait(self) -> int:
        """Its exit code; 128 + n after signal n."""
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        if self.running():
            self._child.terminate()
            self._child.wait()

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """A terminal sends Ctrl-C to the child itself; a signal to this process alone goes on to it. Twice is once."""
        self.interrupted = True
        if self.running():
            self._child.send_signal(signal.SIGTERM)

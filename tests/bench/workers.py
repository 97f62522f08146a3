"""Child processes that do one step at a time on command, so that steps of different programs can take turns.

A line on the child's stdin is a turn, a JSON object on its stdout the answer; the first answer comes unasked, when the
child is ready. Whatever libraries print goes to stderr, into a file that is shown when the child fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import quiet_environ

_END_S = 30.0


class Worker:
    """One such process. ``ready`` is its first answer."""

    def __init__(self, script: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = f"{script.name} {' '.join(arguments)}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environ),
        )
        try:
            self.ready = self._answer()
        except BaseException:
            self.close()
            raise

    def step(self) -> dict[str, Any]:
        """The answer to one turn. Raises RuntimeError with the end of the child's output if it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self.name} ended:\n{self._errors.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def workers(script_arguments: Mapping[str, tuple[Path, Sequence[str]]], threads: int) -> Iterator[dict[str, Worker]]:
    """Started one after the other; all end with the block."""
    started: dict[str, Worker] = {}
    try:
        for name, (script, arguments) in script_arguments.items():
            started[name] = Worker(script, arguments, quiet_environ(threads))
        yield started
    finally:
        for worker in started.values():
            worker.close()


def turns() -> tuple[Callable[[], bool], Callable[[Mapping[str, object]], None]]:
    """For the child: ``wait()`` is true when a turn came and false at the end; ``answer(object)`` ends the turn."""
    wire = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait() -> bool:
        return bool(sys.stdin.readline())

    def answer(content: Mapping[str, object]) -> None:
        wire.write(json.dumps(content) + "\n")
        wire.flush()

    return wait, answer

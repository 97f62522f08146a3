"""``hermes-rl runs logs``: the last lines of a run's log files, and new ones as they come.

Reads by byte offset and never holds a whole file in memory; a half-written last line is left for the next look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_rl_mcp.cli.text import printable

POLL_S = 0.3
_BLOCK = 64 * 1024
_MAX_LINE = 16 * _BLOCK
"""A longer line comes in pieces."""


@dataclass
class LogFile:
    """One log and how far it was read."""

    name: str
    path: Path
    offset: int = 0

    def tail(self, lines: int) -> list[str]:
        """The last whole lines; reading goes on behind them."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            end = start = file.seek(0, 2)
            data = b""
            while start > 0 and data.count(b"\n") <= lines:
                size = min(_BLOCK, start)
                start = file.seek(start - size)
                data = file.read(size) + data
        whole = data[: data.rfind(b"\n") + 1]
        self.offset = end - (len(data) - len(whole))
        return _decode(whole)[-lines:] if lines else []

    def news(self) -> list[str]:
        """Whole lines written since."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(_MAX_LINE)
        whole = data if len(data) == _MAX_LINE and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return _decode(whole)


def lines(logs: list[LogFile], tail: int) -> Iterator[str]:
    """Last lines of each; with several logs, each under its name."""
    for log in logs:
        found = log.tail(tail)
        if len(logs) > 1:
            yield f"== {log.name}: {log.path}"
        yield from found


def follow(logs: list[LogFile], ended: Callable[[], bool]) -> Iterator[str]:
    """New lines until the run has ended and all were read."""
    last_look = False
    while True:
        quiet = True
        for log in logs:
            for line in log.news():
                quiet = False
                yield f"{log.name}: {line}" if len(logs) > 1 else line
        if quiet:
            if last_look:
                return
            last_look = ended()
            time.sleep(0 if last_look else POLL_S)


def _decode(data: bytes) -> list[str]:
    return [printable(line) for line in data.decode(errors="replace").splitlines()]

"""``hermes-rl runs logs``: the last lines of a run's log files, and new ones as they come.

Reads by byte offset and never more than ``_MAX_BYTES`` at once; a half-written last line is left for the next look. A
log that was cut, because it had outgrown its limit, is read on from its new beginning.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.files import NotAFileError, opened

POLL_S = 0.3
_MAX_BYTES = 2**20
"""Of a log's end that is looked through for its last lines, and of one line; a longer one comes in pieces."""
_LINE_END = re.compile(rb"\r\n|\n|\r(?=.)", re.DOTALL)
"""A progress bar begins each of its states with a carriage return. One at the end may be half a line end."""


@dataclass
class LogFile:
    """One log and how far it was read."""

    name: str
    path: Path
    offset: int = 0

    def tail(self, lines: int) -> list[str]:
        """The last whole lines; reading goes on behind them."""
        end = self._size()
        self.offset = max(0, end - _MAX_BYTES)
        begins_within = self.offset > 0
        found = self.news()
        if begins_within and len(found) > 1:
            del found[0]
        return found[-lines:] if lines else []

    def news(self) -> list[str]:
        """Whole lines written since."""
        if self._size() < self.offset:
            self.offset = 0
        try:
            with opened(self.path) as file:
                file.seek(self.offset)
                data = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return []
        found = [data] if len(data) == _MAX_BYTES else []
        if ends := [end.span() for end in _LINE_END.finditer(data)]:
            begins = [0, *(after for _, after in ends)]
            found = [data[begin:end] for begin, (end, _) in zip(begins, ends, strict=False)]
        self.offset += ends[-1][1] if ends else sum(map(len, found))
        return [printable(line.decode(errors="replace")) for line in found]

    def _size(self) -> int:
        try:
            with opened(self.path) as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0
        except NotAFileError as error:
            raise HermesRLError(f"{error}.", hint="It is not the log that the run wrote; remove it.") from error


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

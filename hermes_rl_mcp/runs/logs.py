"""Keeps the logs of a run from filling the disk: each is cut to its end when it outgrows its limit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hermes_rl_mcp.files import trim_log

_log = logging.getLogger(__name__)

_KEEP_BYTES = 2**20


class LogKeeper:
    """Asked at every tick, which bounds how far a log gets beyond ``max_bytes``: what its writer can write in one tick.
    The end that is kept lies beside it in ``<name>.1``."""

    def __init__(self, max_bytes: int, note: Callable[[str], None]) -> None:
        self._max_bytes = max_bytes
        self._keep_bytes = min(_KEEP_BYTES, max_bytes // 2)
        self._note = note
        self._cuts: Counter[str] = Counter()

    def check(self, logs: Iterable[Path]) -> None:
        for log in logs:
            if not trim_log(log, self._max_bytes, self._keep_bytes):
                continue
            self._cuts[log.name] += 1
            count = self._cuts[log.name]
            if count in (1, 10, 100) or count % 1000 == 0:  # a flood must not become one of events
                times = f" for the {count}th time" if count > 1 else ""
                self._note(f"log {log.name} cut{times}: it had outgrown {self._max_bytes} bytes")

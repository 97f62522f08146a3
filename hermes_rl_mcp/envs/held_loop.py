"""Says where an environment's code blocks: a hook that sleeps or computes without ``await`` stops everything else,
the answer to an order to stop included. Invariant: it only looks and says; once for each time.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import TracebackType

log = logging.getLogger(__name__)

HELD_S = 30.0
"""Longer than a scoring that takes its time, shorter than a person's patience."""
BEAT_S = 1.0


class HeldLoop:
    """Entered within the loop it watches. ``file``: the user's; its deepest line is the one that is said."""

    def __init__(self, file: str, held_s: float = HELD_S, beat_s: float = BEAT_S) -> None:
        self._file = file
        self._held_s = held_s
        self._beat_s = beat_s
        self._beat = time.monotonic()
        self._done = threading.Event()
        self._owner = threading.get_ident()
        self._beating: asyncio.Task[None] | None = None
        self._watching: threading.Thread | None = None

    async def __aenter__(self) -> HeldLoop:
        self._owner = threading.get_ident()
        self._beating = asyncio.create_task(self._beats())
        self._watching = threading.Thread(target=self._watch, name="held loop", daemon=True)
        self._watching.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._beating is not None:
            self._beating.cancel()

    async def _beats(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(self._beat_s)

    def _watch(self) -> None:
        said_of = None
        while not self._done.wait(self._beat_s):
            beat = self._beat
            held_s = time.monotonic() - beat
            if held_s > self._held_s and said_of != beat:
                said_of = beat
                log.warning(
                    "the environment's code has held the event loop for %.0f s, at %s: meanwhile nothing is sampled or "
                    "sent. Slow work belongs into await asyncio.to_thread(...)",
                    held_s,
                    self._place(),
                )

    def _place(self) -> str:
        frame = sys._current_frames().get(self._owner)
        if frame is None:
            return "an unknown place"
        lines = traceback.extract_stack(frame)
        deepest = next((one for one in reversed(lines) if one.filename == self._file), lines[-1])
        return f"{deepest.filename}:{deepest.lineno} ({deepest.name})"

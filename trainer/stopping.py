"""SIGTERM and SIGINT to the trainer: leave at once while nothing can be lost, later finish what must be finished.

Invariant: once ``gracefully`` was called a signal only sets the event; nothing is interrupted in the middle of a write.
Before that the process ends on the spot, without unwinding: an exception out of a signal handler is swallowed by some
of the imports that go on then.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class StopSignal:
    def __init__(self) -> None:
        self.event = threading.Event()
        self._graceful = False

    def install(self) -> None:
        """Main thread only."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def gracefully(self) -> None:
        """From now on whoever computes asks ``event`` and ends in order."""
        self._graceful = True

    def completed(self) -> None:
        """From now on no signal counts: all that was asked for is done, and the exit code must say so. Python takes its
        handlers away while it ends, but leaves an ignored signal ignored."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.event.set()
        if not self._graceful:
            os._exit(EXIT_CODE)

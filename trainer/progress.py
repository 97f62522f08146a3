"""What the trainer is doing within a step that takes long, for people who wait: ``progress.json``.

Invariant: steps shorter than ``QUIET_S`` write nothing, and a text belongs to the step it names, so a reader can tell
a stale one by comparing it with the last line of ``metrics.jsonl``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from hermes_rl_mcp.contracts.records import StepProgress
from hermes_rl_mcp.files import write_atomic
from trainer.metrics import utc_now

QUIET_S = 2.0
"""A person waits so long without asking; also the shortest time between two texts of one phase."""

_log = logging.getLogger(__name__)


class ProgressFile:
    """Replaced as a whole; a failed write is only logged, because training does not depend on it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._step = 0
        self._began = clock()
        self._phase = ""
        self._written = float("-inf")
        self._failing = False

    def say(self, step: int, phase: str, detail: str = "") -> None:
        """``step`` is the one under way; ``phase`` a few words, ``detail`` what changes within it."""
        now = self._clock()
        if step != self._step:
            self._step, self._began, self._phase = step, now, ""
        if now - self._began < QUIET_S or (phase == self._phase and now - self._written < QUIET_S):
            return
        self._phase, self._written = phase, now
        self._write(step, f"step {step}: {phase}" + (f", {detail}" if detail else ""))

    def finishing(self, last_step: int, text: str) -> None:
        """After the last step, at once: what follows takes a large model some time."""
        self._write(last_step + 1, text)

    def _write(self, step: int, text: str) -> None:
        try:
            write_atomic(self._path, StepProgress(step=step, text=text, time=utc_now()).model_dump_json() + "\n")
        except OSError as error:
            if not self._failing:  # every other second would fill what is left of a disk
                _log.warning("cannot write %s: %s", self._path, error)
            self._failing = True
        else:
            self._failing = False

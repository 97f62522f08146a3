"""Optional copy of the metrics to Weights & Biases.

Invariant: nothing W&B does or fails to do reaches training: all of it happens on a thread of its own, the trainer
never waits for it except for a bounded moment at the end, and a failure is logged once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QUEUE_LENGTH = 1000
"""Steps that may wait for a slow connection before further ones are left out."""
_FINISH_S = 15.0
"""For the last upload; what is missing can be sent later with ``wandb sync``."""

_log = logging.getLogger(__name__)


class WandbSink:
    """Give it a step's metrics with ``log``; end with ``finish``."""

    def __init__(self, *, project: str, group: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUE_LENGTH)
        settings = {"project": project, "group": group, "name": name, "dir": str(folder), "config": dict(config)}
        self._thread = threading.Thread(target=self._work, args=(settings,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._queue.put_nowait((step, known))
        except queue.Full:
            _log.warning("W&B is too slow: step %d is left out there", step)

    def finish(self) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_FINISH_S)
        if self._thread.is_alive():
            _log.warning("W&B did not finish within %.0f s; send the rest with 'wandb sync'", _FINISH_S)

    def _work(self, settings: dict[str, Any]) -> None:
        item: tuple[int, dict[str, float]] | None = (0, {})
        try:
            import wandb

            run = wandb.init(**settings, tags=["trainer"], save_code=False)
            while (item := self._queue.get()) is not None:
                run.log(item[1], step=item[0])
            run.finish()
        except Exception as error:  # noqa: BLE001  a sink must not end the run, whatever it raises
            _log.warning("W&B is off for the rest of this run: %s: %s", type(error).__name__, error)
            while item is not None:  # keep the queue empty, so that the trainer never finds it full
                item = self._queue.get()

"""Optional copy of the metrics to Weights & Biases.

Invariant: nothing W&B does or fails to do reaches training: all of it happens in a process of its own, which the
trainer feeds from a thread, never waits for except for a bounded moment at the end, and then ends. What went wrong is
in ``wandb.json`` of the run directory, for the status.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.records import WandbState
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.redact import redact_text

_QUEUE_LENGTH = 1000
"""Steps that may wait for a slow connection before further ones are left out."""
FINISH_S = 15.0
"""For the last upload; what is missing can be sent later with ``wandb sync``."""

_log = logging.getLogger(__name__)


class WandbSink:
    """Give it a step's metrics with ``log``; end with ``finish``. ``state`` says how it stands."""

    def __init__(
        self,
        *,
        project: str,
        group: str,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        state_file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        finish_s: float = FINISH_S,
    ) -> None:
        self.state = WandbState()
        self._state_file = state_file
        self._finish_s = finish_s
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUE_LENGTH)
        settings = {"project": project, "group": group, "name": name, "dir": str(folder), "config": dict(config)}
        self._queue.put(json.dumps({"settings": settings}))
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.wandb_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=None if environ is None else dict(environ),
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that W&B's own service ends with it
        )
        self._writer = threading.Thread(target=self._write, name="wandb-out", daemon=True)
        self._reader = threading.Thread(target=self._read, name="wandb-in", daemon=True)
        self._writer.start()
        self._reader.start()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._queue.put_nowait(json.dumps({"step": step, "values": known}))
        except queue.Full:
            _log.warning("W&B is too slow: step %d is left out there", step)

    def finish(self) -> WandbState:
        """Waits for the last upload, at most ``finish_s``; then W&B's processes are gone."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        try:
            self._child.wait(self._finish_s)
        except subprocess.TimeoutExpired:
            lost = f"W&B did not finish within {self._finish_s:.0f} s; send the rest with: wandb sync"
            _log.warning("%s", lost)
            self._learn({"error": f"{self.state.error}. {lost}" if self.state.error else lost})
        with suppress(ProcessLookupError):  # its service may outlive it
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._reader.join(1.0)
        return self.state

    def _write(self) -> None:
        assert self._child.stdin is not None
        gone = False
        while (line := self._queue.get()) is not None:
            if gone:
                continue  # keep the queue empty, so that the trainer never finds it full
            try:
                self._child.stdin.write(line + "\n")
                self._child.stdin.flush()
            except (OSError, ValueError):  # the child is gone; what it said is in the state
                gone = True
        with suppress(OSError, ValueError):
            self._child.stdin.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as said:
            for line in said:
                with suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        self._learn(found)
        if self.state.state not in ("finished", "failed"):
            self._learn({"state": "failed", "error": self.state.error or "W&B's process ended"})

    def _learn(self, news: Mapping[str, Any]) -> None:
        try:
            state = WandbState.model_validate({**self.state.model_dump(), **news})
        except ValidationError:
            return
        if state.error:
            state.error = redact_text(state.error)
            if state.error != self.state.error:
                _log.warning("W&B: %s", state.error)
        self.state = state
        if self._state_file is not None:
            with suppress(OSError):  # a full disk; the metrics come first
                write_atomic(self._state_file, state.model_dump_json() + "\n")

"""What an environment process leaves on disk: its metric lines, its count of groups, the report of its failure."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.saying import cut, said
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_text, secret_values

log = logging.getLogger(__name__)

STATE_S = 1.0
"""Between two writes of ``env_state.json``, which sync the disk."""
_MESSAGE_CHARS = 2000
_ERROR_CHARS = 1000
"""Of the first error; the log has all of it."""


class MetricLines:
    """Appends to ``env_metrics.jsonl``, one flushed line per call. Without a run the lines go to the log."""

    def __init__(self, run_dir: Path | None) -> None:
        self._path = RunPaths(run_dir).env_metrics if run_dir else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """NaN and infinity become null."""
        values = {name: _finite(value) for name, value in metrics.items()}
        if self._path is None:
            log.info("step %d: %s", step, json.dumps(values))
            return
        line = json.dumps({"step": step, "time": now(), **values}, default=str)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class StateFile:
    """Replaces ``env_state.json``: at most once in ``STATE_S``, but at once when a row of bad groups begins or ends.

    ``secrets`` (the run's address holds one) are masked. Without a run nothing is written; a failed write is no reason
    to stop: the file is for readers only.
    """

    def __init__(
        self, run_dir: Path | None, secrets: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = RunPaths(run_dir).env_state if run_dir else None
        self._secrets = tuple(secrets)
        self._clock = clock
        self._last: EnvState | None = None
        self._written_at = -math.inf
        self._complained = False

    def offer(self, state: EnvState, *, last: bool = False) -> None:
        """The state now; the last one before the end is always written."""
        if self._path is None or not (last or self._is_due(state)):
            return
        self._last, self._written_at = state, self._clock()
        error = redact_text(state.first_error, self._secrets)[:_ERROR_CHARS]
        try:
            write_atomic(self._path, state.model_copy(update={"first_error": error}).model_dump_json() + "\n")
        except OSError as problem:
            if not self._complained:
                log.warning("cannot write %s: %s", self._path, problem)
            self._complained = True

    def _is_due(self, state: EnvState) -> bool:
        last = self._last
        if last is None or (state.unusable_in_a_row > 0) != (last.unusable_in_a_row > 0):
            return True
        changed = state.model_copy(update={"time": last.time}) != last
        return changed and self._clock() - self._written_at >= STATE_S


def write_failure(run_dir: Path, error: BaseException, where: str = "") -> None:
    """``report_env.json``, replaced atomically. ``where``: the place in the user's file, if it is known."""
    message, hint = f"The environment failed: {said(error)}", "The environment's log has the traceback."
    if isinstance(error, HermesRLError):
        message, hint = cut(error.message, _MESSAGE_CHARS), cut(error.hint, _MESSAGE_CHARS)
    if where and where not in message:
        message += f" ({where})"
    message = redact_text(message, secret_values(os.environ))
    report = ChildReport(process="env", status="failed", error=message, hint=hint or None, finished_at=now())
    write_atomic(RunPaths(run_dir).report("env"), report.model_dump_json(indent=1) + "\n")


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

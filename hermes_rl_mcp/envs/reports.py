"""What an environment process leaves on disk: its metric lines and, if it fails, the report of its end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.paths import RunPaths

log = logging.getLogger(__name__)


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


def write_failure(run_dir: Path, error: BaseException) -> None:
    """``report_env.json``, replaced atomically."""
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message, hint = f"The environment failed: {said}", "The environment's log has the traceback."
    if isinstance(error, HermesRLError):
        message, hint = error.message, error.hint
    report = ChildReport(process="env", status="failed", error=message, hint=hint or None, finished_at=now())
    write_atomic(RunPaths(run_dir).report("env"), report.model_dump_json(indent=1) + "\n")


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None

"""What a run took, from its record and its metrics, in the figures of its estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hermes_rl_mcp.contracts.estimates import Actual
from hermes_rl_mcp.contracts.records import TrainerSummary
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.runs.forecast.earlier import pace_of


def actual(record: RunRecord, lines: Sequence[dict[str, Any]], summary: TrainerSummary | None) -> Actual:
    """So far, if the run goes on. ``lines`` are those of ``metrics.jsonl``; of a continued run only its own steps."""
    first = record.resumed_step or 0
    own = [line for line in lines if isinstance(line.get("step"), int) and line["step"] > first]
    pace = pace_of(own)
    gpu = summary.extra.get("gpu_memory_bytes") if summary else None
    started = record.startup_seconds
    return Actual(
        memory_bytes=record.peak_memory_bytes,
        gpu_memory_bytes=gpu if isinstance(gpu, int) else None,
        disk_bytes=record.disk_bytes,
        seconds_per_step=round(pace.step_s, 3) if pace else None,
        startup_seconds=None if started is None else round(started, 1),
        total_seconds=None if started is None else round(started + record.running_seconds, 1),
        sampled_tokens=round(pace.sampled_tokens * len(own)) if pace else None,
    )

"""What earlier runs of the same model and environment took on this machine. Reads their directories, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.forecast.footprint import number
from hermes_rl_mcp.runs.store import RunStore

_LOOKED_AT = 12
"""Of the runs that fit, newest first."""
_ENOUGH_STEPS = 3


@dataclass(frozen=True)
class Pace:
    """The measured steps of a run."""

    step_s: float
    """Median of time/step_s."""
    mean_step_s: float
    """Without the first, which waits for the environment, if there are enough others."""
    first_extra_s: float
    compute_s: float
    """Sampling and training within a step, on average."""
    sampled_tokens: float
    """Per step."""
    answer: float
    """Tokens per answer."""
    truncated: float
    """Share of answers that were cut off at max_token_length."""


@dataclass(frozen=True)
class Earlier:
    """A run that can be compared with the one to come."""

    record: RunRecord
    request: RunRequest
    steps: int
    pace: Pace


def find_earlier(home: Home, request: RunRequest) -> Earlier | None:
    """The newest run of this model, environment and device with measured steps; one of the same lengths goes first."""
    store = RunStore(home)
    fitting = [
        record
        for record in store.list()
        if isinstance(record, RunRecord)
        and record.run_id != request.run_id
        and (record.base_model, record.environment, record.device)
        == (request.base_model, request.environment, request.device)
    ]
    found: list[Earlier] = []
    for record in fitting[:_LOOKED_AT]:
        if one := _read(home, store, record):
            found.append(one)
            if one.steps >= _ENOUGH_STEPS and _lengths(one.request) == _lengths(request):
                return one
    found.sort(key=lambda one: (_lengths(one.request) == _lengths(request), one.steps >= _ENOUGH_STEPS), reverse=True)
    return found[0] if found else None


def pace_of(lines: Sequence[dict[str, Any]]) -> Pace | None:
    """From lines of ``metrics.jsonl``; None if no step has its times."""
    steps = [line for line in lines if _number(line, "time/step_s") is not None]
    if not steps:
        return None
    taken = [_number(line, "time/step_s") or 0.0 for line in steps]
    later = taken[1:] if len(taken) >= _ENOUGH_STEPS else taken
    sampled = [_product(line, "tokens/sampled_per_s", "time/sample_s") for line in steps]
    compute = [(_number(line, "time/sample_s") or 0.0) + (_number(line, "time/train_s") or 0.0) for line in steps]
    lengths = [value for line in steps if (value := _number(line, "rollouts/length_mean")) is not None]
    cut = [value for line in steps if (value := _number(line, "rollouts/truncated_fraction")) is not None]
    return Pace(
        step_s=median(taken),
        mean_step_s=fmean(later),
        first_extra_s=max(0.0, taken[0] - fmean(later)),
        compute_s=fmean(compute),
        sampled_tokens=fmean(sampled),
        answer=fmean(lengths) if lengths else 1.0,
        truncated=fmean(cut) if cut else 0.0,
    )


def _read(home: Home, store: RunStore, record: RunRecord) -> Earlier | None:
    try:
        request = RunRequest.model_validate_json(read_file(home.run(record.run_id).request))
    except (OSError, ValidationError):
        return None
    lines = store.metrics(record.run_id).lines
    pace = pace_of(lines)
    return Earlier(record, request, len(lines), pace) if pace else None


def _lengths(request: RunRequest) -> tuple[int, ...]:
    return tuple(number(request.env, name, 0) for name in ("max_token_length", "group_size", "batch_size"))


def _number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _product(line: dict[str, Any], left: str, right: str) -> float:
    return (_number(line, left) or 0.0) * (_number(line, right) or 0.0)

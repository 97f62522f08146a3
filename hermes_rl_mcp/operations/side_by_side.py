"""Several runs side by side: what was set differently, what they measured after the same number of steps, and what the
evaluation at the end said of each. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio
from pydantic import JsonValue

from hermes_rl_mcp.contracts.results import Comparison, ConfigDifference, EqualStep
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.fitting import rounded, size, spread
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.redact import redact

MOST_RUNS = 6
METRICS = (
    *("reward/mean", "train/loss", "train/percent_correct", "eval/percent_correct", "rollouts/length_mean"),
    "time/step_s",
)
_STEPS = 10
_VALUE_CHARS = 200
"""Of one value: a difference is to be seen, not read in full."""
_OWN = {
    *("data_path_to_save_groups", "checkpoint_dir", "rollout_server_url", "base_url", "wandb_name", "wandb_run_name"),
    *("run_id", "path_prefix", "nonce"),
}
"""Differ between any two runs and say nothing."""


class Compared(NamedTuple):
    comparison: Comparison
    cut: bool
    """Some differences were left out."""


async def comparison(context: Context, run_ids: Sequence[str], chars: int) -> Compared:
    """Raises InvalidValueError, UnknownRunError or UnreadableRunError."""
    if not 2 <= len(run_ids) <= MOST_RUNS:
        raise InvalidValueError(
            f"compare names {len(run_ids)} different runs; it takes 2 to {MOST_RUNS}.",
            hint="Call rl_list_runs without compare to see the ids.",
        )
    readers = [await RunReader.open(context, run_id) for run_id in run_ids]
    return await anyio.to_thread.run_sync(_compared, readers, chars)


def flat(request: RunRequest) -> dict[str, JsonValue]:
    """Every value of a run, as rl_start_training shows them; secrets masked."""
    values: dict[str, JsonValue] = {
        **request.server_values,
        **request.trainer.model_dump(mode="json"),
        **request.env,
        "model_name": request.base_model,
        "server_type": request.server_type,
    }
    masked: dict[str, JsonValue] = redact(values)
    return masked


def _compared(readers: Sequence[RunReader], chars: int) -> Compared:
    ids = [reader.record.run_id for reader in readers]
    requests = {reader.record.run_id: reader.request() for reader in readers}
    values = {run_id: _settings(request) for run_id, request in requests.items() if request is not None}
    names = sorted({name for one in values.values() for name in one} - _OWN)
    differing = [name for name in names if len({repr(one.get(name)) for one in values.values()}) > 1]
    differences = [
        ConfigDifference(field=name, values={run_id: _short(one.get(name)) for run_id, one in values.items()})
        for name in differing
    ]
    kept, left = 0, chars // 2
    while kept < len(differences) and left >= 0:
        left -= size(differences[kept].model_dump(mode="json"))
        kept += 1
    return Compared(
        Comparison(
            run_ids=ids,
            differences=differences[:kept],
            equal_fields=len(names) - len(differing),
            steps=_steps({reader.record.run_id: reader.metrics() for reader in readers}, chars // 3),
            evaluation={reader.record.run_id: reader.held_out() for reader in readers},
            unknown=[run_id for run_id, request in requests.items() if request is None],
        ),
        kept < len(differences),
    )


def _settings(request: RunRequest) -> dict[str, JsonValue]:
    """What was set, and what it was set for."""
    return {
        **flat(request),
        "environment": request.environment,
        "env_file": request.env_file,
        "env_sha256": request.env_sha256[:12],
        "device": request.device,
        "profile": request.profile,
        "resume_from": request.resume_from,
    }


def _steps(lines: Mapping[str, Sequence[dict[str, JsonValue]]], chars: int) -> list[EqualStep]:
    by_step = {
        run_id: {step: line for line in some if isinstance(step := line.get("step"), int)}
        for run_id, some in lines.items()
    }
    common = sorted(set.intersection(*(set(steps) for steps in by_step.values())))
    most = _STEPS
    while True:
        rows = [_row(common[i], by_step) for i in spread(len(common), most)]
        if most == 1 or size([row.model_dump(mode="json") for row in rows]) <= chars:
            return rows
        most -= 1


def _row(step: int, by_step: Mapping[str, Mapping[int, dict[str, JsonValue]]]) -> EqualStep:
    found = {name: {run_id: _number(steps[step].get(name)) for run_id, steps in by_step.items()} for name in METRICS}
    known = {name: values for name, values in found.items() if any(value is not None for value in values.values())}
    return EqualStep(step=step, values=rounded(known))


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _short(value: JsonValue) -> JsonValue:
    text = value if isinstance(value, str) else ""
    return f"{text[:_VALUE_CHARS]}…" if len(text) > _VALUE_CHARS else value

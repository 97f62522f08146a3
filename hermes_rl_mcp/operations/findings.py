"""Gathers what is known of a run for its diagnosis. Reads only the ends of files that grow, so it costs no time.

What cannot be read is absent, and what is absent raises no flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from hermes_rl_mcp.checkpoints import Marked, last_marked
from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest
from hermes_rl_mcp.contracts.vitals import EnvState, Vitals
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.runs.forecast.device import free_disk_bytes
from hermes_rl_mcp.runs.forecast.footprint import checkpoint_bytes
from hermes_rl_mcp.runs.forecast.modelfiles import locate
from hermes_rl_mcp.runs.watch.diagnosis import diagnose
from hermes_rl_mcp.runs.watch.evidence import Evidence, Thresholds

M = TypeVar("M", bound=BaseModel)


def flags(context: Context, record: RunRecord) -> list[Flag]:
    """What is wrong with this run now, worst first."""
    limits = Thresholds()
    paths = context.home.run(record.run_id)
    request = _parsed(paths.request, RunRequest)
    last = last_marked(paths.checkpoints)
    evidence = Evidence(
        record=record,
        lines=context.runs.recent(record.run_id, limits.window),
        vitals=vitals(context, record),
        env_state=_parsed(paths.env_state, EnvState),
        values=_values(request) if request else {},
        free_bytes=None if record.status.terminal else _free_bytes(paths.dir),
        checkpoint_bytes=_checkpoint_bytes(context, last, request),
        last_checkpoint=str(last.path) if last else None,
    )
    return diagnose(evidence, limits)


def vitals(context: Context, record: RunRecord) -> Vitals | None:
    """What the processes of a run did a moment ago; None for one that has ended."""
    return None if record.status.terminal else _parsed(context.home.run(record.run_id).vitals, Vitals)


def _parsed(path: Path, model: type[M]) -> M | None:
    try:
        return model.model_validate_json(read_file(path))
    except (OSError, ValidationError):  # not there yet, or of another version
        return None


def _values(request: RunRequest) -> dict[str, JsonValue]:
    return {**request.trainer.model_dump(mode="json"), **request.env}


def _free_bytes(folder: Path) -> int | None:
    try:
        return free_disk_bytes(folder)
    except OSError:
        return None


def _checkpoint_bytes(context: Context, last: Marked | None, request: RunRequest | None) -> int | None:
    """As large as the last one; before the first, as large as the start reckoned."""
    if last:
        try:
            return sum((last.path / name).stat().st_size for name in last.marker.files)
        except OSError:  # an old one goes when a new one is complete
            return None
    if request is None:
        return None
    shape = locate(request.base_model, request.model_path, context.operator.environ).shape
    return checkpoint_bytes(shape, request.trainer.lora_rank)

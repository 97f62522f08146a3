"""Stopping and summing up runs. The runs themselves are detached supervisors; see runs/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import anyio
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.contracts.exports import ExportState
from hermes_rl_mcp.contracts.results import GetResults, HistoryRow, RunLogs, RunSummary, StopTraining
from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest, RunStatus, Starter
from hermes_rl_mcp.contracts.sections import SectionName, SectionQuery
from hermes_rl_mcp.errors import ConfirmationError, NotFoundError, UnknownRunError, UnreadableRunError
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations import findings
from hermes_rl_mcp.operations.actual import actual
from hermes_rl_mcp.operations.asking import Caller, is_anothers, stop_question
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.fitting import rounded, size, spread
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.sections import KEY_METRICS, next_offset, sections, truncated
from hermes_rl_mcp.runs import launch

LATEST = "latest"
"""In place of a run's id where nothing is changed: the run that was started last."""
HISTORY_CHARS = 11_000
"""Of an answer's history as JSON: ten steps with all their metrics."""
_LEAST_HISTORY_CHARS = 2_500
_META_KEYS = ("step", "time")


async def stop_training(
    context: Context, run_id: str, caller: Caller | None = None, confirm: bool = False
) -> StopTraining:
    """rl_stop_training. Asks the run's supervisor, and returns at once. Of a run that has ended it ends the exports.

    Raises ConfirmationError for what another client started, unless ``confirm`` says that a person agreed.
    """
    from hermes_rl_mcp.operations import exporting  # seldom used, and the server must start fast

    try:
        before = (await RunReader.open(context, run_id)).record
    except UnknownRunError:
        from hermes_rl_mcp.operations import inference  # seldom used, and the server must start fast

        status = await inference.stop_test(context, run_id)
        if status is None:
            raise
        message = f"Inference test '{run_id}': {status}. rl_test_inference(test_id='{run_id}') shows what it has."
        return StopTraining(message=message, run_id=run_id, status=status)
    except UnreadableRunError:  # a damaged record does not make a run unstoppable
        before = None
    if before is not None and before.status.terminal:
        status = before.status.value
        message = f"Run '{run_id}' is not running (status: {status})."
        for export in await exporting.stop_exports(context, run_id, caller, confirm):
            message += f" Its export {export.name} is {export.status}."
        return StopTraining(message=message, run_id=run_id, status=status)
    asked_before = context.home.run(run_id).stop_request.exists()
    by = None if asked_before else await anyio.to_thread.run_sync(_started_by, context, run_id)
    if by is not None and caller is not None and not confirm and is_anothers(by, caller):
        raise ConfirmationError(stop_question(before, run_id, by, caller))
    after = await launch.stop(context.home, run_id, "rl_stop_training")
    if after.status.terminal:
        message = f"Run '{run_id}' ended as {after.status.value}."
    else:
        message = (
            f"Stopping run '{run_id}': environment, trainer, then rollout API. "
            "The trainer writes a checkpoint first. Follow it with rl_check_status."
        )
        if after.status is not RunStatus.STOPPING:
            message += " Its supervisor has not taken it up yet; the request is on disk and holds."
    return StopTraining(message=message, run_id=run_id, status=after.status.value)


def _started_by(context: Context, run_id: str) -> Starter | None:
    """None if nobody knows: of a run of an earlier version, or with a damaged request."""
    try:
        return RunRequest.model_validate_json(read_file(context.home.run(run_id).request)).started_by
    except (OSError, ValidationError):
        return None


def _exports(context: Context, run_id: str) -> list[ExportState]:
    if not context.home.run(run_id).exports.is_dir():
        return []
    from hermes_rl_mcp.operations.exporting import exports

    return exports(context, run_id)


async def get_results(
    context: Context,
    run_id: str,
    max_points: int = 10,
    metrics: Sequence[str] = (),
    include: Sequence[SectionName] = (),
    query: SectionQuery = SectionQuery(),
    history_chars: int | None = None,
) -> GetResults:
    """rl_get_results. Works at any time; a run that goes on shows what it has so far.

    ``metrics`` names the columns of the history, a name that ends in ``/`` all of that group. Within ``history_chars``
    of JSON it has the metrics that matter most, or fewer steps.
    """
    reader = await RunReader.open(context, await named(context, run_id))
    run_id, record = reader.record.run_id, reader.record
    lines = await anyio.to_thread.run_sync(reader.metrics)
    flags = await anyio.to_thread.run_sync(reader.flags)
    parts = await sections(context, reader, include, query) if include else None
    if parts is not None and history_chars is not None:
        history_chars = max(_LEAST_HISTORY_CHARS, history_chars - size(parts.model_dump(mode="json")))
    shown = history(lines, max_points, metrics, history_chars)
    summary = reader.trainer_summary()
    rewards = [line.get("reward/mean") for line in lines]
    checkpoints = [str(checkpoint.path) for checkpoint in context.runs.checkpoints(run_id)]
    url, problem = reader.wandb()
    return GetResults(
        run_id=run_id,
        status=record.status.value,
        environment=record.environment,
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        final_metrics=lines[-1] if lines else {},
        history=shown.rows,
        steps=len(lines),
        total_steps=record.total_steps,
        base_model=record.base_model,
        adapter_path=reader.adapter_path(checkpoints),
        checkpoints=checkpoints,
        reward_first5=mean(rewards[:5]),
        reward_last5=mean(rewards[-5:]),
        preview=summary.preview if summary else None,
        evaluation=reader.held_out(),
        error=record.error,
        hint=record.hint,
        flags=flags,
        resumed_from=record.resumed_from,
        resumed_step=record.resumed_step,
        wandb_url=url,
        wandb_error=problem,
        estimate=await anyio.to_thread.run_sync(reader.estimate),
        actual=actual(record, lines, summary),
        exports=await anyio.to_thread.run_sync(_exports, context, run_id),
        sections=parts,
        truncated=shown.cut or truncated(parts),
        next_offset=next_offset(parts),
    )


class History(NamedTuple):
    """Rows of a run's history, and whether there would have been more within what was asked for."""

    rows: list[HistoryRow]
    cut: bool


def history(
    lines: Sequence[dict[str, JsonValue]], most: int, names: Sequence[str] = (), chars: int | None = None
) -> History:
    """At most ``most`` steps, evenly spaced, first and last included."""
    chosen = list(names)
    rows = _rows(lines, most, chosen)
    if chars is None or _size(rows) <= chars:
        return History(rows, False)
    chosen = chosen or [*KEY_METRICS]
    while True:
        rows = _rows(lines, most, chosen)
        if most == 1 or _size(rows) <= chars:
            return History(rows, True)
        most = max(1, min(most - 1, most * chars // _size(rows)))


def _rows(lines: Sequence[dict[str, JsonValue]], most: int, names: Sequence[str]) -> list[HistoryRow]:
    return [_row(lines[i], names) for i in spread(len(lines), most)]


def _row(line: dict[str, JsonValue], names: Sequence[str]) -> HistoryRow:
    step = line.get("step")
    groups = tuple(name for name in names if name.endswith("/"))
    kept = {
        name: value
        for name, value in line.items()
        if name not in _META_KEYS and (not names or name in names or (groups and name.startswith(groups)))
    }
    return HistoryRow(step=step if isinstance(step, int) else 0, values=rounded(kept))


def _size(rows: Sequence[HistoryRow]) -> int:
    return size([row.model_dump(mode="json") for row in rows])


async def named(context: Context, run_id: str) -> str:
    """``run_id``, or the newest run's if it is ``latest``. Raises NotFoundError if there is none."""
    if run_id != LATEST:
        return run_id
    found = await anyio.to_thread.run_sync(context.runs.list)
    for run in found:
        if isinstance(run, RunRecord):
            return run.run_id
    raise NotFoundError("There are no runs yet, so there is no latest one.", hint="Call rl_start_training first.")


def summary(context: Context, record: RunRecord) -> RunSummary:
    last = context.runs.latest(record.run_id) or {}
    reward = last.get("reward/mean")
    step = last.get("step")
    return RunSummary(
        run_id=record.run_id,
        environment=record.environment,
        status=record.status.value,
        wandb_run_name=record.wandb_run_name,
        base_model=record.base_model,
        step=step if isinstance(step, int) else 0,
        total_steps=record.total_steps,
        reward_mean=float(reward) if isinstance(reward, int | float) else None,
        created_at=record.created_at,
        note=record.error or ". ".join(part for part in (_attention(context, record), record.detail) if part) or None,
    )


def _attention(context: Context, record: RunRecord) -> str:
    """The flags of a run that goes on, by name; of one that has ended they are in its results."""
    found = [] if record.status.terminal else findings.flags(context, record)
    return f"needs attention: {', '.join(flag.name for flag in found)}" if found else ""


def logs(context: Context, run_id: str) -> RunLogs:
    """Where the three processes write."""
    paths = {name: str(context.home.log(name, run_id)) for name in ("api", "trainer", "env")}
    return RunLogs.model_validate(paths)


def mean(values: list[JsonValue]) -> float | None:
    """Of the numbers among them; None if there is none."""
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None

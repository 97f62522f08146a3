"""What the pages show, gathered from a run's files. Invariant: known secrets are masked in everything that leaves here.

What is not a coroutine reads files and is called off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import yaml
from anyio import to_thread
from pydantic import BaseModel, JsonValue, ValidationError

from hermes_rl_mcp.contracts.records import Evaluation, Preview, RolloutLine
from hermes_rl_mcp.contracts.results import CheckStatus, Comparison
from hermes_rl_mcp.contracts.runs import Event, RunRecord
from hermes_rl_mcp.contracts.sections import CheckpointInfo, LogName, LogPage, SectionQuery
from hermes_rl_mcp.dashboard.series import Curve, Series
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations import findings
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader, known_secrets
from hermes_rl_mcp.operations.sections import checkpoints_page, events_page, log_page
from hermes_rl_mcp.operations.side_by_side import comparison
from hermes_rl_mcp.operations.status import snapshot
from hermes_rl_mcp.redact import redact, secret_values
from hermes_rl_mcp.runs.store import Unreadable
from hermes_rl_mcp.untrusted import shown, shown_values

ROWS = 25
"""Runs on one page of the list."""
LOG_BYTES, WHOLE_LOG_BYTES = 12_288, 65_536
"""Of a log beside the rest, and on a page of its own."""
_MOST_ROLLOUTS = 32
_TEXT_CHARS = 4_000
_NAME_CHARS = 80
_EVENTS, _CHECKPOINTS = 60, 20
_BUDGET = 400_000
"""Characters of one part: a page for people is scrolled, not read whole."""

M = TypeVar("M", bound=BaseModel)


class RunRow(NamedTuple):
    """One run in the list."""

    run_id: str
    status: str
    environment: str
    model: str
    step: int
    total_steps: int
    reward: float | None
    spark: tuple[float, ...]
    created_at: str
    note: str
    flags: tuple[str, ...]


class RunList(NamedTuple):
    """One page of the list."""

    rows: list[RunRow]
    total: int
    """Runs that match."""
    all_runs: int
    offset: int
    active: int


class Filter(NamedTuple):
    """Which runs are listed."""

    text: str = ""
    """Part of the id, environment, model or name."""
    status: str = ""
    offset: int = 0


class RunQuery(NamedTuple):
    """What of a run is shown."""

    step: int | None = None
    """Whose rollouts; the newest without it."""
    log: LogName = "trainer"


class SideBySide(NamedTuple):
    """Several runs."""

    records: list[RunRecord]
    curves: dict[str, Curve]
    differences: list[tuple[str, dict[str, JsonValue]]]
    """Field, and its value by run."""
    evaluations: dict[str, Evaluation | None]


class Rollouts(NamedTuple):
    """The rollouts of one step, and which steps lie beside it."""

    step: int | None
    lines: list[RolloutLine]
    left_out: int
    first: int | None
    before: int | None
    after: int | None
    last: int | None


@dataclass(frozen=True)
class RunView:
    """One run."""

    record: RunRecord
    status: CheckStatus
    curve: Curve
    held_out: Evaluation | None
    preview: Preview | None
    adapter_path: str | None
    rollouts: Rollouts
    log: LogPage
    log_sizes: dict[str, int]
    events: list[Event]
    checkpoints: list[CheckpointInfo]
    config: list[tuple[str, list[tuple[str, str]]]]
    folder: str
    started_by: str
    """Client that asked for it, as it names itself; empty if nobody knows."""


def listed(context: Context, series: Series, wanted: Filter) -> RunList:
    """Runs that match, newest first."""
    found = context.runs.list()
    matching = [run for run in found if _matches(run, wanted)]
    offset = min(max(0, wanted.offset), max(0, len(matching) - 1) // ROWS * ROWS)
    active = sum(isinstance(run, RunRecord) and not run.status.terminal for run in found)
    secrets = secret_values(context.operator.environ)
    rows = [_row(context, series, run, secrets) for run in matching[offset : offset + ROWS]]
    return RunList(rows, len(matching), len(found), offset, active)


def run_view(context: Context, series: Series, reader: RunReader, query: RunQuery) -> RunView:
    """Everything a run's page shows."""
    run_id = reader.record.run_id
    secrets = known_secrets(context, run_id)
    checkpoints = [str(one.path) for one in context.runs.checkpoints(run_id)]
    summary = reader.trainer_summary()
    held_out = reader.held_out()
    request = reader.request()
    by = request.started_by if request else None
    starter = str(redact(f"{by.client} {by.version}".strip(), secrets)) if by else ""
    return RunView(
        record=_masked(reader.record, secrets),
        status=_masked(snapshot(context, reader), secrets),
        curve=_named(series.curve(run_id), secrets),
        held_out=_masked(held_out, secrets) if held_out else None,
        preview=_masked(summary.preview, secrets) if summary and summary.preview else None,
        adapter_path=reader.adapter_path(checkpoints),
        rollouts=_rollouts(series, run_id, query.step, secrets),
        log=log_page(context, reader, SectionQuery(limit=LOG_BYTES, process=query.log), _BUDGET),
        log_sizes=_log_sizes(context, run_id),
        events=events_page(context, reader, SectionQuery(limit=_EVENTS), _BUDGET).rows[::-1],
        checkpoints=checkpoints_page(context, reader, SectionQuery(limit=_CHECKPOINTS), _BUDGET).rows[::-1],
        config=_config(context, run_id, secrets),
        folder=str(context.home.run(run_id).dir),
        started_by=shown(starter, _NAME_CHARS),
    )


async def side_by_side(context: Context, series: Series, run_ids: Sequence[str]) -> SideBySide:
    """Raises InvalidValueError, UnknownRunError or UnreadableRunError."""
    found = (await comparison(context, run_ids, _BUDGET)).comparison
    records = [(await RunReader.open(context, run_id)).record for run_id in run_ids]
    secrets = [one for run_id in run_ids for one in known_secrets(context, run_id)]
    masked = Comparison.model_validate(shown_values(redact(found.model_dump(mode="json"), secrets)))
    return SideBySide(
        records=[_masked(record, secrets) for record in records],
        curves={run_id: await to_thread.run_sync(series.curve, run_id) for run_id in run_ids},
        differences=[(one.field, one.values) for one in masked.differences],
        evaluations=masked.evaluation,
    )


def whole_log(context: Context, reader: RunReader, process: LogName, offset: int) -> LogPage:
    """One window of a log; below 0 its end."""
    return log_page(context, reader, SectionQuery(offset=offset, limit=WHOLE_LOG_BYTES, process=process), _BUDGET)


def _matches(run: RunRecord | Unreadable, wanted: Filter) -> bool:
    if isinstance(run, Unreadable):
        status, texts = run.label, [run.run_id]
    else:
        status = run.status.value
        texts = [run.run_id, run.environment, run.base_model, run.wandb_run_name]
    if wanted.status and status != wanted.status:
        return False
    return not wanted.text or any(wanted.text.lower() in text.lower() for text in texts)


def _row(context: Context, series: Series, run: RunRecord | Unreadable, secrets: list[str]) -> RunRow:
    if isinstance(run, Unreadable):
        reason = str(redact(run.reason, secrets))
        return RunRow(run.run_id, run.label, "", "", 0, 0, None, (), "", reason, ())
    run = _masked(run, secrets)
    last = context.runs.latest(run.run_id) or {}
    step, reward = last.get("step"), last.get("reward/mean")
    flags = () if run.status.terminal else tuple(flag.name for flag in findings.flags(context, run))
    return RunRow(
        run_id=run.run_id,
        status=run.status.value,
        environment=run.environment,
        model=run.base_model,
        step=step if isinstance(step, int) else 0,
        total_steps=run.total_steps,
        reward=float(reward) if isinstance(reward, int | float) else None,
        spark=series.spark(run.run_id),
        created_at=run.created_at,
        note=run.error or run.detail,
        flags=flags,
    )


def _named(curve: Curve, secrets: list[str]) -> Curve:
    """Parts of the reward are named by the environment."""
    values = {shown(str(redact(name, secrets)), _NAME_CHARS): column for name, column in curve.values.items()}
    return replace(curve, values=values)


def _masked(value: M, secrets: list[str]) -> M:
    return type(value).model_validate(shown_values(redact(value.model_dump(mode="json"), secrets)))


def _rollouts(series: Series, run_id: str, step: int | None, secrets: list[str]) -> Rollouts:
    steps = series.rollout_steps(run_id)
    if not steps:
        return Rollouts(step, [], 0, None, None, None, None)
    chosen = steps[-1] if step is None else step
    found = series.rollouts(run_id, chosen)
    lines = []
    for line in found[:_MOST_ROLLOUTS]:
        try:
            parsed = RolloutLine.model_validate(line)
        except ValidationError:  # of a later version, or damaged
            continue
        lines.append(
            RolloutLine.model_validate(shown_values(redact(parsed.model_dump(mode="json"), secrets), _TEXT_CHARS))
        )
    before = [one for one in steps if one < chosen]
    after = [one for one in steps if one > chosen]
    return Rollouts(
        step=chosen,
        lines=lines,
        left_out=max(0, len(found) - _MOST_ROLLOUTS),
        first=steps[0],
        before=before[-1] if before else None,
        after=after[0] if after else None,
        last=steps[-1],
    )


def _log_sizes(context: Context, run_id: str) -> dict[str, int]:
    names: tuple[LogName, ...] = ("trainer", "env", "api", "supervisor")
    found: dict[str, int] = {}
    for name in names:
        try:
            found[name] = context.home.log(name, run_id).lstat().st_size
        except OSError:
            found[name] = 0
    return found


def _config(context: Context, run_id: str, secrets: list[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """By section; before the run has its ports, what it was asked for."""
    paths = context.home.run(run_id)
    try:
        loaded: Any = yaml.safe_load(read_file(paths.config if paths.config.is_file() else paths.request))
    except (OSError, yaml.YAMLError):
        return []
    masked = shown_values(redact(loaded, secrets))
    if not isinstance(masked, dict):
        return []
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, value in masked.items():
        if isinstance(value, dict):
            sections[name] = [(key, _said(item)) for key, item in value.items()]
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            sections[name] = [(key, _said(item)) for one in value for key, item in one.items()]
        else:
            sections.setdefault("run", []).append((name, _said(value)))
    return [(name, rows) for name, rows in sections.items() if rows]


def _said(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value != "" else "empty"

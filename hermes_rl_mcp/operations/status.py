"""rl_check_status: a snapshot, a limit on how often there is a fresh one, and waiting for news.

The limit is kept on disk per run, so restarting the server does not lift it. It delays metrics, never a change of
state, never a run that ended, and an unknown run id leaves no trace. A stall that begins or ends and a new flag are
changes of state. Parts that are included beside a repeated snapshot tell nothing newer than it does: only ``events``,
which are changes of state, come through; the others are named in ``withheld``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import anyio
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.results import CheckStatus, StatusMetrics
from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.contracts.sections import SectionName, SectionQuery
from hermes_rl_mcp.files import make_private_dir, read_file, write_atomic
from hermes_rl_mcp.operations.context import MAX_WAIT_S, PROGRESS_S, Context, Progress, no_progress
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.sections import next_offset, sections, truncated
from hermes_rl_mcp.operations.training import logs, named

log = logging.getLogger(__name__)

PLOT_RESERVE_S = 15.0
"""Kept of a call's time when a plot is to be drawn after the wait."""
_READ_RESERVE_S = 2.5
"""Kept for reading and answering: a call with the longest wait, too, ends within MAX_WAIT_S."""
_SHORT_LIMIT_S = 2.0
"""A limit that ends within this time is waited out when parts are asked for."""
_CLOCKS_S = 0.05
"""The limit is of the wall clock, waiting of the monotonic one."""
_UNLIMITED: tuple[SectionName, ...] = ("events",)
_PACE_KNOWN = 3
"""Steps from which on the pace alone is believed."""
_PACE_STEPS = 10
"""Steps over which the pace is taken."""


class LastCheck(BaseModel):
    """What the last fresh answer said, and when."""

    model_config = ConfigDict(extra="forbid")

    at: float
    """Wall clock, seconds."""
    snapshot: CheckStatus


async def check_status(
    context: Context,
    run_id: str,
    wait_seconds: float = 0.0,
    progress: Progress = no_progress,
    include: Sequence[SectionName] = (),
    query: SectionQuery = SectionQuery(),
) -> CheckStatus:
    """With ``wait_seconds`` it returns as soon as state, flags or step differ from the last answer, else when time is
    up. ``include`` adds parts of the run, as far as the limit allows fresh ones."""
    most = MAX_WAIT_S - (PLOT_RESERVE_S if "plot" in include else _READ_RESERVE_S)
    deadline = time.monotonic() + min(max(wait_seconds, 0.0), most)
    reader = await RunReader.open(context, await named(context, run_id))
    run_id = reader.record.run_id
    last = _last_check(context, run_id)
    found = await anyio.to_thread.run_sync(reader.flags)
    seen = _seen(last, reader, found)
    if include and (limited_s := _limited_s(context, last, reader.record)) <= _SHORT_LIMIT_S:
        deadline = max(deadline, time.monotonic() + limited_s + _CLOCKS_S)
    while True:
        limited_s = _limited_s(context, last, reader.record)
        changed = seen.state_changed(reader, found)
        news = changed or (limited_s == 0 and reader.step() != seen.step)
        left_s = deadline - time.monotonic()
        if news or left_s <= 0 or reader.record.status.terminal:
            break
        await progress(*_position(reader))
        await reader.wait(min(left_s, PROGRESS_S, limited_s or PROGRESS_S), for_steps=limited_s == 0)
        found = await anyio.to_thread.run_sync(reader.flags)
    if limited_s > 0 and last is not None and not changed:
        withheld = [name for name in dict.fromkeys(include) if name not in _UNLIMITED]
        told = _repeated(last.snapshot, limited_s, withheld)
        return await _with_parts(context, reader, told, [name for name in include if name in _UNLIMITED], query)
    answer = await anyio.to_thread.run_sync(snapshot, context, reader, found)
    await anyio.to_thread.run_sync(_remember, context, answer)
    return await _with_parts(context, reader, answer, include, query)


async def _with_parts(
    context: Context, reader: RunReader, answer: CheckStatus, include: Sequence[SectionName], query: SectionQuery
) -> CheckStatus:
    if not include:
        return answer
    parts = await sections(context, reader, include, query)
    return answer.model_copy(
        update={"sections": parts, "truncated": truncated(parts), "next_offset": next_offset(parts)}
    )


def snapshot(context: Context, reader: RunReader, flags: list[Flag] | None = None) -> CheckStatus:
    """Everything that is known of the run now; ``flags`` if they were just read."""
    record = reader.record
    lines = reader.recent(_PACE_STEPS)
    last = lines[-1] if lines else {}
    evaluated = _float(last.get("eval/percent_correct"))
    url, problem = reader.wandb()
    return CheckStatus(
        run_id=record.run_id,
        status=record.status.value,
        environment=record.environment,
        running_time_minutes=round(record.running_seconds / 60, 3),
        processes=_processes(record),
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        logs=logs(context, record.run_id),
        metrics=StatusMetrics(
            step=_int(last.get("step")),
            reward_mean=_float(last.get("reward/mean")),
            percent_correct=_float(last.get("train/percent_correct")),
            eval_percent_correct=reader.evaluation() if evaluated is None else evaluated,
        ),
        total_steps=record.total_steps,
        detail=reader.doing(),
        error=record.error,
        hint=record.hint,
        latest=last,
        eta_seconds=None if record.status.terminal else _eta(lines, record, reader.estimate()),
        queue_position=record.queue_position,
        stop_unconfirmed=bool(record.leftover_pids),
        wandb_url=url,
        wandb_error=problem,
        sends_to=reader.sends_to(),
        stalled=record.stalled and not record.status.terminal,
        waiting=reader.waiting(),
        flags=reader.flags() if flags is None else flags,
        resumed_from=record.resumed_from,
        resumed_step=record.resumed_step,
    )


class _Seen(NamedTuple):
    """What the caller was told last."""

    status: str
    step: int | None
    stalled: bool
    flags: frozenset[str]

    def state_changed(self, reader: RunReader, found: list[Flag]) -> bool:
        """A flag that goes is no news: one that comes and goes would lift the limit."""
        new = {flag.name for flag in found} - self.flags
        return reader.status != self.status or reader.record.stalled != self.stalled or bool(new)


def _seen(last: LastCheck | None, reader: RunReader, found: list[Flag]) -> _Seen:
    """Of the last answer; without one, what is there now."""
    if last is None:
        return _Seen(reader.status, reader.step(), reader.record.stalled, frozenset(flag.name for flag in found))
    told = last.snapshot
    return _Seen(told.status, told.metrics.step, told.stalled, frozenset(flag.name for flag in told.flags))


def _limited_s(context: Context, last: LastCheck | None, record: RunRecord) -> float:
    """Seconds until a fresh answer is due; 0 if it is now."""
    if last is None or record.status.terminal:
        return 0.0
    age = context.clock() - last.at
    if age < 0:  # the clock was set back
        return 0.0
    return max(0.0, context.settings.profile.status_interval_s - age)


def _repeated(shown: CheckStatus, limited_s: float, withheld: list[SectionName]) -> CheckStatus:
    wait = f"{limited_s / 60:.0f} minutes" if limited_s >= 120 else f"{max(limited_s, 0.1):.1f} seconds"
    message = (
        f"Rate limited. Next check available in {wait}; this repeats the last snapshot. "
        "A change of state is shown at once. Training takes a while: do something else meanwhile."
    )
    if withheld:
        message += f" Not included until then: {', '.join(withheld)}."
    return shown.model_copy(
        update={
            "rate_limited": True,
            "next_check_in_seconds": round(limited_s, 3),
            "message": message,
            "withheld": withheld,
        }
    )


def _last_check(context: Context, run_id: str) -> LastCheck | None:
    path = context.home.checks / f"{run_id}.json"
    try:
        return LastCheck.model_validate_json(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("ignoring the last check of run %s: %s", run_id, error)
        return None


def _remember(context: Context, answer: CheckStatus) -> None:
    try:
        make_private_dir(context.home.checks)
        path = context.home.checks / f"{answer.run_id}.json"
        text = LastCheck(at=context.clock(), snapshot=answer).model_dump_json()
        write_atomic(path, text, durable=False)
    except OSError as error:  # a full disk must not hide a run's state
        log.warning("cannot store the time of this check: %s", error)


def _position(reader: RunReader) -> tuple[float, float | None, str]:
    record, step = reader.record, reader.step() or 0
    text = f"{record.status.value}: step {step} of {record.total_steps}"
    return float(step), float(record.total_steps), f"{text}. {record.detail}" if record.detail else text


def _processes(record: RunRecord) -> dict[str, str]:
    shown: dict[str, str] = {}
    for name, process in record.processes.items():
        if process.exit_code is not None:
            shown[name] = f"exited ({process.exit_code})"
        elif process.identity is None:
            shown[name] = "not started"
        elif record.status.terminal:
            shown[name] = "gone"
        else:
            shown[name] = "running" if process.ready else "starting"
    return shown


def _eta(lines: list[dict[str, JsonValue]], record: RunRecord, said: Estimate | None) -> float | None:
    """From the pace of the last steps; the first ones mislead, so until there are some the estimate counts as well."""
    taken = [value for line in lines[-_PACE_STEPS:] if (value := _float(line.get("time/step_s"))) is not None]
    step = (_int(lines[-1].get("step")) or len(lines)) if lines else (record.resumed_step or 0)
    left = max(0, record.total_steps - step)
    if record.status is RunStatus.QUEUED or not left:
        return None  # nobody knows when its turn comes, or what is done after the last step
    if len(taken) < _PACE_KNOWN and said is not None and said.seconds_per_step is not None:
        starting = (said.startup_seconds or 0.0) if record.running_since is None else 0.0
        return round(starting + left * said.seconds_per_step, 1)
    return round(left * sorted(taken)[len(taken) // 2], 1) if taken else None


def _int(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

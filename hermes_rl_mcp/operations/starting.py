"""rl_start_training: every check, the estimate, and then the start; or, as a dry run, all but the start.

Nothing of a run exists before the last check has passed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.catalog.describe import file_sha256
from hermes_rl_mcp.contracts.exports import ExportFormat
from hermes_rl_mcp.contracts.results import RunLogs, StartTraining
from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.errors import ConfirmationError, InvalidValueError, PreflightError
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.asking import Caller, start_question, starter
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.environments import Selected, selected
from hermes_rl_mcp.operations.estimating import Forecast, forecast
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.resume import Continuation, continuation
from hermes_rl_mcp.operations.side_by_side import flat
from hermes_rl_mcp.operations.training import logs
from hermes_rl_mcp.paths import claims_dir
from hermes_rl_mcp.runs import claims, launch
from hermes_rl_mcp.runs.configuration.checks import problems
from hermes_rl_mcp.runs.configuration.session import Session
from hermes_rl_mcp.runs.forecast.device import chosen_device, detect_device
from hermes_rl_mcp.runs.forecast.preflight import preflight
from hermes_rl_mcp.runs.receivers import receivers
from hermes_rl_mcp.runs.request import RunIdentity, build_request
from hermes_rl_mcp.runs.runconfig import first_record

log = logging.getLogger(__name__)

START_WAIT_S = 10.0
"""rl_start_training answers when the supervisor has written its first record, which takes about a second."""
MEASURE_S, DRY_MEASURE_S = 5.0, 35.0
"""From the call to the end of a measurement of the machine: a start answers within 10 s, a dry run within 50."""


@dataclass(frozen=True)
class _Plan:
    """A run that could be started: nothing of it exists yet."""

    request: RunRequest
    forecast: Forecast
    origin: Continuation | None
    notes: list[str]


async def start_training(
    context: Context,
    idempotency_key: str | None = None,
    resume_from: str | None = None,
    dry_run: bool = False,
    caller: Caller | None = None,
    confirm: bool = False,
) -> StartTraining:
    """rl_start_training. Everything that can be known to fail is found before anything is started.

    A second call with the same key answers with the run of the first, whatever the configuration is by then.
    ``resume_from`` is an ended run, which the new one continues. With ``dry_run`` everything is checked and nothing
    made. Raises ConfirmationError for a run beyond a soft ceiling, unless ``confirm`` says that a person agreed.
    """
    until = time.monotonic() + (DRY_MEASURE_S if dry_run else MEASURE_S)
    known = None
    if idempotency_key:
        known = await anyio.to_thread.run_sync(launch.run_with_key, context.home, idempotency_key)
        if known and not dry_run:
            return _known(context, (await RunReader.open(context, known)).record, resume_from)
    plan = await _plan(context, idempotency_key, resume_from, until)
    question = start_question(context.settings.limits, plan.forecast.estimate)
    if question and not confirm and not dry_run:
        raise ConfirmationError(question)
    request = plan.request.model_copy(update={"started_by": starter(caller)})
    if dry_run:
        await anyio.to_thread.run_sync(partial(preflight, context.home, request, context.operator.environ, dry=True))
        answer = _explained(plan, _planned(context, plan))
        notes = [f"Before a start a person would be asked: {question}"] if question else []
        if known is not None:
            notes.append(
                f"This idempotency_key belongs to run {known}: a start with it would give that run, not a new one."
            )
        return answer.model_copy(update={"warnings": [*answer.warnings, *notes]})
    prepare: launch.Prepare | None = partial(plan.origin.prepare, request) if plan.origin else None
    await relaunch_queued(context)  # after a reboot those that waited before keep their places
    record = await launch.start(context.home, request, context.operator.environ, wait_s=START_WAIT_S, prepare=prepare)
    if record.run_id != request.run_id:
        return _known(context, record, resume_from)
    return _explained(plan, _started(context, request, record))


async def _plan(context: Context, idempotency_key: str | None, resume_from: str | None, until: float) -> _Plan:
    origin = await continuation(context, resume_from) if resume_from else None
    now = origin.selected if origin else await selected(context)
    await _check(context, now)
    found = await anyio.to_thread.run_sync(detect_device, context.operator.environ)
    identity = RunIdentity(
        run_id=launch.new_run_id(),
        created_at=context.now().isoformat(timespec="milliseconds"),
        env_sha256=file_sha256(Path(now.info.file_path)),
        device=chosen_device(now.resolution.fields["device"].value, found),
    )
    request = build_request(now.resolution, now.info, context.home, identity, idempotency_key or None)
    if origin:
        request = origin.continued(request)
    expected = await forecast(context, request, now.resolution.schema, until=until)
    notes = [] if origin else _unseen(context, now.session)
    return _Plan(request.model_copy(update={"estimate": expected.estimate}), expected, origin, notes)


def _unseen(context: Context, session: Session) -> list[str]:
    """What other servers changed since this one last showed the configuration to anybody: it is what runs."""
    seen, reader = context.viewer.revision, context.viewer.name
    if seen is None:
        return []
    if session.selection > seen and session.selected_by != reader:
        what = f"environment '{session.environment}' was selected by {session.selected_by}"
    elif changed := session.unseen(seen, reader):
        what = "changed were " + ", ".join(f"{name} (by {writer})" for name, writer in changed.items())
    else:
        return []
    return [f"Since this server last showed the configuration, {what}. That is what is trained."]


def _explained(plan: _Plan, answer: StartTraining) -> StartTraining:
    answer = answer.model_copy(update={"warnings": [*answer.warnings, *plan.notes, *plan.forecast.warnings]})
    return answer if plan.origin is None else plan.origin.explained(plan.request, answer)


def _request(context: Context, run_id: str) -> RunRequest:
    path = context.home.run(run_id).request
    try:
        return RunRequest.model_validate_json(read_file(path))
    except (OSError, ValidationError) as error:
        raise PreflightError(
            f"What run {run_id} was asked to do cannot be read: {path} is damaged or gone.",
            hint="Its checkpoints may be whole all the same: rl_get_results(run_id) names them.",
        ) from error


async def start_export(
    context: Context, run_id: str, kind: ExportFormat, caller: Caller | None = None, confirm: bool = False
) -> StartTraining:
    """rl_start_training(export_of=...): the run that is exported, as a start describes one, and the export."""
    from hermes_rl_mcp.operations import exporting  # seldom used, and the server must start fast

    await RunReader.open(context, run_id)  # an unknown run is called that
    run = await anyio.to_thread.run_sync(_request, context, run_id)
    record, state = await exporting.start_export(context, run_id, kind, caller, confirm)
    if state.status == "running":
        message = (
            f"The export {state.name} of run {run_id} goes on in the background, also without this client. It takes "
            f"some seconds to minutes; rl_get_results(run_id='{run_id}') says how far it is."
        )
    else:
        message = f"The export {state.name} of run {run_id} is already {state.status}; see rl_get_results."
    return _started(context, run, record).model_copy(update={"message": message, "export": state, "estimate": None})


def _known(context: Context, record: RunRecord, resume_from: str | None) -> StartTraining:
    """The answer to a key that was used before. Only the run on record is described, whatever was asked for now."""
    request = _request(context, record.run_id)
    answer = _started(context, request, record)
    message = (
        f"Nothing new was started: this idempotency_key belongs to run {record.run_id} of {record.created_at}, with "
        f"the configuration shown here; it is {record.status.value}. For another run use another key."
    )
    if resume_from is None or resume_from == request.resume_from:
        return answer.model_copy(update={"message": message})
    origin = f"continues run {request.resume_from}" if request.resume_from else "continues no run"
    note = f"resume_from='{resume_from}' was not followed: run {record.run_id} {origin}."
    return answer.model_copy(update={"message": message, "warnings": [*answer.warnings, note]})


async def relaunch_queued(context: Context) -> list[str]:
    """Queued runs that a reboot left without a supervisor get a new one. For a server's start: never raises."""
    try:
        found = await launch.relaunch_queued(context.home, context.operator.environ)
    except Exception:  # a boundary: whatever is wrong with old runs, the server must serve
        log.exception("queued runs of before the reboot were not started again")
        return []
    if found:
        log.info("started again after the reboot: %s", ", ".join(found))
    return found


async def _check(context: Context, now: Selected) -> None:
    found = problems(now.resolution)
    if found:
        first = found[0]
        rest = [str(problem) for problem in found[1:]]
        hint = " ".join(filter(None, [first.hint, *(f"Also: {text}" for text in rest)]))
        raise InvalidValueError(first.message, hint=hint, details=first.details)
    values = now.resolution.section("env")
    reply = await context.describer.validate(now.info, values)
    if not reply.ok:
        reasons = "; ".join(f"{name}: {text}" for name, text in reply.errors.items())
        raise InvalidValueError(
            f"The environment '{now.info.name}' refuses its configuration: {reasons}.",
            hint="Change the field with rl_edit_config.",
            details={"fields": sorted(reply.errors)},
        )
    _check_data_dir(values.get("data_dir"))


def _check_data_dir(folder: JsonValue) -> None:
    if isinstance(folder, str) and folder and not Path(folder).expanduser().is_dir():
        raise PreflightError(
            f"data_dir = '{folder}' is not an existing folder.",
            hint="Set it with rl_edit_config to the folder that holds the data, as an absolute path.",
            details={"field": "data_dir"},
        )


def _planned(context: Context, plan: _Plan) -> StartTraining:
    """The answer of a dry run: that of a start, without what only a run has."""
    record = first_record(context.home, plan.request)
    ahead = plan.forecast.ahead
    message = "Nothing was started (dry_run). Every check passed."
    if ahead:
        message += f" A run started now would wait for the {plan.request.device} behind {', '.join(ahead)}."
    return _started(context, plan.request, record).model_copy(
        update={
            "run_id": "",
            "status": "not started",
            "wandb_run_name": "",
            "config_path": "",
            "logs": RunLogs(api="", trainer="", env=""),
            "message": message,
            "dry_run": True,
            "queue_position": len(ahead) or None,
        }
    )


def _started(context: Context, request: RunRequest, record: RunRecord) -> StartTraining:
    return StartTraining(
        run_id=request.run_id,
        status=record.status.value,
        environment=request.environment,
        config=flat(request),
        wandb_project=record.wandb_project,
        wandb_run_name=record.wandb_run_name,
        config_path=str(context.home.run(request.run_id).config),
        logs=logs(context, request.run_id),
        message=_started_message(context, record),
        env_file=request.env_file,
        env_sha256=request.env_sha256,
        resumed_from=request.resume_from,
        resumed_step=request.resume_step,
        queue_position=record.queue_position,
        estimate=request.estimate,
        sends_to=receivers(request, context.operator.environ),
    )


def _started_message(context: Context, record: RunRecord) -> str:
    follow = "Follow it with rl_check_status(run_id, wait_seconds=50)."
    run = f"Run {record.run_id} ({record.environment} on {record.base_model})"
    if record.status.terminal:
        said = " ".join(text for text in (record.error, record.hint) if text)
        return f"{run} was started and is already {record.status.value}. {said}".strip()
    if record.status is RunStatus.QUEUED:
        holder = claims.holder(claims_dir(context.operator.environ), record.device)
        by = f"run {holder} has it" if holder and holder != record.run_id else "it is about to be free"
        place = f" at position {record.queue_position}" if record.queue_position else ""
        return (
            f"{run} waits for the {record.device}{place}: {by}. It starts by itself, also without this client. {follow}"
        )
    return f"{run} was started in the background and goes on without this client. {follow}"

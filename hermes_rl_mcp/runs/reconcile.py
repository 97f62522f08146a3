"""What a reader does about a run whose supervisor is gone: end what it left behind and close its record.

The proof is the supervisor's lock: free, although the record is not terminal. Only the holder of that lock acts, and it
signals only processes whose identity it can verify. Nothing is ever guessed to be completed: it takes the trainer's
own record of a run of which only the evaluation was left.
"""

from __future__ import annotations

import logging
from typing import Any

import yaml
from pydantic import ValidationError

from hermes_rl_mcp.checkpoints import newest
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import Identity, RunRecord, RunStatus, StopRequest
from hermes_rl_mcp.contracts.vitals import Vitals
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_text
from hermes_rl_mcp.runs import locks, outcome, reserve
from hermes_rl_mcp.runs.process import boot_id, end_all, is_alive, marked
from hermes_rl_mcp.runs.specs import marker
from hermes_rl_mcp.runs.state import RunState, read_record

_log = logging.getLogger(__name__)

TERM_S = 3.0
"""The children got the news by their lifeline when the supervisor died, so most of this has passed already."""
KILL_S = 2.0
_DYING_S = 1.0
"""A killed process lets go of its lock when the last of its threads is gone, which may be in the middle of a write."""


def waits_for_relaunch(record: RunRecord) -> bool:
    """A queued run that a reboot left without supervisor: nothing of it was lost, so it may still have its turn."""
    rebooted = record.supervisor is not None and record.supervisor.boot_id != boot_id()
    return record.status is RunStatus.QUEUED and rebooted


def reconcile(paths: RunPaths, record: RunRecord) -> RunRecord:
    """``record``, or the one that closes it. Takes up to ``TERM_S + KILL_S`` if stubborn processes were left."""
    if record.status.terminal or (locks.is_held(paths.supervisor_lock) and not _is_dying(record)):
        return record
    lock = locks.take(paths.supervisor_lock, timeout_s=_DYING_S)
    if lock is None:
        return record
    try:
        state = RunState.load(paths)
        return state.record if state.record.status.terminal else _close(paths, state)
    finally:
        lock.release()


def fail(paths: RunPaths, reason: str, error: str, hint: str) -> RunRecord:
    """Closes the record of a run whose supervisor died before it did anything."""
    lock = locks.take(paths.supervisor_lock, timeout_s=locks.PROBE_S)
    if lock is None:
        return read_record(paths)
    try:
        state = RunState.load(paths)
        if not state.record.status.terminal:
            state.move(state.announced or RunStatus.FAILED, reason, error=error, hint=hint)
        return state.record
    finally:
        lock.release()


def _is_dying(record: RunRecord) -> bool:
    supervisor = record.supervisor
    return supervisor is not None and supervisor.boot_id == boot_id() and not is_alive(supervisor)


def _close(paths: RunPaths, state: RunState) -> RunRecord:
    """The closed record. If it cannot be written, this reader shows it all the same, and the next one tries again."""
    record = state.record
    if state.announced not in (None, RunStatus.INTERRUPTED):  # its supervisor had judged it, and died before writing
        left = _end_leftovers(paths, record)
        state.move(state.announced, "", leftover_pids=[one.pid for one in left])
        return state.record
    stop = _stop_reason(paths)
    if record.status is RunStatus.QUEUED and stop is not None:
        state.move(RunStatus.STOPPING, f"stop asked for: {stop}", stop_reason=stop)
        state.move(RunStatus.STOPPED, "it had not started")
        return state.record
    if waits_for_relaunch(record):
        return record
    if record.supervisor is not None and record.supervisor.boot_id != boot_id():
        leftovers: list[Identity] = []
        reason = "the machine was restarted while the run was going"
    else:
        leftovers = _end_leftovers(paths, record)
        reason = "the run's supervisor is gone without a record of how the run ended"
    vitals = _vitals(paths)
    changes: dict[str, Any] = {
        "leftover_pids": [one.pid for one in leftovers],
        "running_seconds": max(record.running_seconds, vitals.running_seconds if vitals else 0.0),
        "peak_memory_bytes": vitals.peak_memory_bytes if vitals else None,
    }
    if _was_being_evaluated(paths):
        state.move(RunStatus.COMPLETED, f"the trainer completed; while it was evaluated, {reason}", **changes)
        return state.record
    changes |= {"error": f"Interrupted: {reason}.{_what_is_known(paths)}", "hint": _way_on(paths)}
    try:
        state.move(RunStatus.INTERRUPTED, reason, **changes)
    except OSError as error:
        _log.warning("run %s has lost its supervisor and cannot be closed now: %s", record.run_id, error)
        return record.model_copy(update={"status": RunStatus.INTERRUPTED, "detail": "", **changes})
    return state.record


def _was_being_evaluated(paths: RunPaths) -> bool:
    """The trainer had saved everything and stayed up for the evaluation alone: no exit can tell more."""
    report = outcome.read_report(paths, "trainer")
    return report is not None and report.status == "completed" and report.stays_s > 0


def _way_on(paths: RunPaths) -> str:
    if newest(paths.checkpoints) is None:
        return "There was no complete checkpoint yet: start it again with rl_start_training()."
    return f"rl_start_training(resume_from='{paths.run_id}') goes on from its last complete checkpoint."


def _what_is_known(paths: RunPaths) -> str:
    """What may have had to do with it."""
    report = outcome.read_report(paths, "trainer")
    said = ""
    if report is not None and report.status == "completed":
        said = " The trainer had left its completion record."
    elif report is not None and report.error:
        config = _config(paths)
        secrets = (config.run.nonce, config.run.path_prefix) if config else ()
        said = f" The trainer had reported: {redact_text(report.error, secrets)}"
    free, folder = reserve.fullest([paths.dir])
    full = f" The disk is full: {free // 1024} KiB are left in {folder}." if free < reserve.FULL_BYTES else ""
    return full + said


def _vitals(paths: RunPaths) -> Vitals | None:
    try:
        return Vitals.model_validate_json(read_file(paths.vitals))
    except (OSError, ValidationError):
        return None


def _end_leftovers(paths: RunPaths, record: RunRecord) -> list[Identity]:
    """Recorded children, and whatever carries the run's marker. Returns those that would not go."""
    recorded = [process.identity for process in record.processes.values() if process.identity is not None]
    config = _config(paths)
    found = marked(marker(config)) if config is not None else []
    known = {one.pid for one in recorded}
    return end_all([*recorded, *(one for one in found if one.pid not in known)], term_s=TERM_S, kill_s=KILL_S)


def _config(paths: RunPaths) -> RunConfig | None:
    try:
        return RunConfig.model_validate(yaml.safe_load(read_file(paths.config)))
    except (OSError, yaml.YAMLError, ValidationError):
        return None


def _stop_reason(paths: RunPaths) -> str | None:
    try:
        return StopRequest.model_validate_json(read_file(paths.stop_request)).reason
    except (OSError, ValidationError):
        return None

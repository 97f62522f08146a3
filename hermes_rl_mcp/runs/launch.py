"""Starts and stops runs from the server's side. A run that was started no longer needs whoever started it.

The launcher makes the run directory whole and locked, and hands the lock to the supervisor by descriptor, so there is
no moment at which a run exists without either a holder of its lock or a reader's right to close it.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import anyio
from anyio import to_thread
from pydantic import ValidationError

from hermes_rl_mcp.contracts.runs import UNKNOWN, RunRecord, RunRequest, RunStatus, StopRequest
from hermes_rl_mcp.errors import PreflightError, UnreadableRunError
from hermes_rl_mcp.files import create_once, make_private_dir, now, private, read_file, read_tail, write_atomic
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.redact import redact_text
from hermes_rl_mcp.runs import locks, reserve
from hermes_rl_mcp.runs.forecast.preflight import preflight
from hermes_rl_mcp.runs.process import signal_process
from hermes_rl_mcp.runs.reconcile import fail, waits_for_relaunch
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.specs import supervisor_environ
from hermes_rl_mcp.runs.state import RecordReadError, RunState, read_record
from hermes_rl_mcp.runs.store import RunStore

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_START_LOCK_TIMEOUT_S = 10.0
"""Held while a directory is made and a process spawned, which takes milliseconds."""
_STOP_ANSWER_S = 1.0
"""A live supervisor acknowledges a stop within a tick; if it does not, the answer need not wait for it."""
_TAIL_BYTES = 4096

_DRAFT = ".new-"
_DRAFT_AGE_S = 60.0
"""Between a folder's creation and its lock lie microseconds; a minute is not in doubt even on a network disk."""

Prepare = Callable[[RunPaths], None]
"""Puts further files into a run directory that is still a draft. Whatever it raises, there is no run then."""


def new_run_id() -> str:
    """8 hex characters."""
    return secrets.token_hex(4)


async def start(
    home: Home,
    request: RunRequest,
    environ: Mapping[str, str],
    *,
    wait_s: float = 10.0,
    prepare: Prepare | None = None,
) -> RunRecord:
    """Starts a detached supervisor for ``request`` and returns once it has the device or a place in its
    queue, or after ``wait_s``.

    The same idempotency key gives the same run. Raises what ``preflight`` raises, and PreflightError with the end of
    its log if the supervisor died at once; the run is then on record as failed.
    """
    paths, supervisor = await to_thread.run_sync(_begin, home, request, environ, prepare)
    if supervisor is None:
        return await to_thread.run_sync(RunStore(home).get, paths.run_id)
    return await _taken_over(home, paths, supervisor, wait_s)


async def stop(home: Home, run_id: str, reason: str) -> RunRecord:
    """Asks for a stop and returns at once; the stop goes on. Nothing happens to a run that has ended.

    The request is on disk before anybody is woken, so it holds even if the supervisor is just starting a process.
    """
    store = RunStore(home)
    request = StopRequest(reason=reason, requested_at=now()).model_dump_json()
    try:
        record = await to_thread.run_sync(store.get, run_id)
    except UnreadableRunError:
        if not locks.is_held(home.run(run_id).supervisor_lock):
            raise
        create_once(home.run(run_id).stop_request, request)  # its supervisor looks for it, and writes the record anew
        return await _readable_again(store, run_id)
    if record.status.terminal:
        return record
    paths = home.run(run_id)
    try:
        create_once(paths.stop_request, request)
    except OSError as error:  # a full disk must not make a run unstoppable: its supervisor takes the signal for one
        if record.supervisor is None:
            raise PreflightError(
                f"The stop could not be asked for: {error.strerror}.", hint="Free some disk space, then stop it again."
            ) from error
        _log.warning("run %s: no stop request on disk: %s", run_id, error)
    if record.supervisor is not None:
        signal_process(record.supervisor, signal.SIGTERM)
    return await store.wait_change(run_id, record.revision, sys.maxsize, _STOP_ANSWER_S)


async def _readable_again(store: RunStore, run_id: str) -> RunRecord:
    deadline = time.monotonic() + _STOP_ANSWER_S
    while True:
        try:
            return await to_thread.run_sync(store.get, run_id)
        except UnreadableRunError:
            if time.monotonic() >= deadline:
                raise
        await anyio.sleep(_POLL_S)


async def relaunch_queued(home: Home, environ: Mapping[str, str], *, wait_s: float = 10.0) -> list[str]:
    """Gives queued runs that a reboot left without supervisor a new one. Returns their ids, oldest first."""
    relaunched = []
    for listed in reversed(await to_thread.run_sync(RunStore(home).active)):
        paths = home.run(listed.run_id)
        if not waits_for_relaunch(listed):
            continue
        take = partial(locks.take, paths.supervisor_lock, timeout_s=locks.PROBE_S)
        with anyio.CancelScope(shield=True):  # a lock that nobody knows of would be held for good
            lock = await to_thread.run_sync(take)
        if lock is None:
            continue
        record = read_record(paths)
        if not waits_for_relaunch(record):  # another server was quicker, and that supervisor is gone already
            lock.release()
            continue
        try:
            await _taken_over(home, paths, _spawn(home, paths, lock, environ), wait_s, known=record)
        except PreflightError as error:  # on record with the run; the others still have their turn
            _log.warning("%s", error)
        else:
            relaunched.append(record.run_id)
    return relaunched


def run_with_key(home: Home, key: str) -> str | None:
    """Run that was started with this idempotency key."""
    for run_id in RunStore(home).ids():
        try:
            request = RunRequest.model_validate_json(read_file(home.run(run_id).request))
        except (OSError, ValidationError):
            continue
        if request.idempotency_key == key:
            return request.run_id
    return None


def _begin(
    home: Home, request: RunRequest, environ: Mapping[str, str], prepare: Prepare | None
) -> tuple[RunPaths, threading.Thread | None]:
    """Makes the run and starts its supervisor; None if a run with the same key is there already."""
    preflight(home, request, environ)
    try:
        with _draft(home, request) as (draft, lock):
            if prepare is not None:  # may copy gigabytes, so others can start their runs meanwhile
                prepare(draft)
            with locks.holding(home.runs / ".start.lock", timeout_s=_START_LOCK_TIMEOUT_S):
                key = request.idempotency_key
                if key is not None and (known := run_with_key(home, key)):
                    lock.release()
                    return home.run(known), None
                paths = _publish(home, request, draft)
        return paths, _spawn(home, paths, lock, environ)
    except TimeoutError as error:
        raise PreflightError(
            f"The run could not be started: {error}.",
            hint="Try again; if it stays, end the hanging hermes-rl-mcp process.",
        ) from error
    except OSError as error:
        raise _no_start(f"{error.strerror or error} ({error.filename or home.runs})", error) from error


@contextmanager
def _draft(home: Home, request: RunRequest) -> Iterator[tuple[RunPaths, locks.HeldLock]]:
    """A run directory that nobody sees yet, locked before it is seen: a reader would close a run that nobody carries
    out. Its lock also says that somebody is still at work on it."""
    if home.run(request.run_id).dir.exists():
        raise PreflightError(f"Run {request.run_id} exists already.", hint="Start again: a new id will be drawn.")
    _clear_drafts(home)
    draft = RunPaths(home.runs / f"{_DRAFT}{request.run_id}" / request.run_id)
    try:
        make_private_dir(draft.dir)
        lock = locks.take(draft.supervisor_lock, timeout_s=locks.PROBE_S)
        assert lock is not None  # the draft's name is ours alone; who clears drafts only looks
        try:
            yield draft, lock
        except BaseException:
            lock.release()
            raise
    finally:
        shutil.rmtree(draft.dir.parent, ignore_errors=True)


def _publish(home: Home, request: RunRequest, draft: RunPaths) -> RunPaths:
    """Completes the draft with its request and first record and gives it its place: whole or not at all."""
    reserve.make(draft.reserve)
    write_atomic(draft.request, request.model_dump_json(indent=1))
    RunState.create(draft, first_record(home, request), "created")
    paths = home.run(request.run_id)
    draft.dir.rename(paths.dir)
    return paths


def _clear_drafts(home: Home) -> None:
    """What launchers left that were killed at work. A draft that somebody works on is locked, but for its first
    instant."""
    for folder in home.runs.glob(f"{_DRAFT}*"):
        try:
            locked = any(locks.is_held(lock) for lock in folder.glob("*/supervisor.lock"))
            if not locked and time.time() - folder.stat().st_mtime > _DRAFT_AGE_S:
                shutil.rmtree(folder)
        except OSError as error:  # somebody else clears it
            _log.debug("%s: %s", folder, error)


def _no_start(reason: str, error: OSError) -> PreflightError:
    full = reserve.is_full(error)
    hint = "Free some disk space, then start again." if full else "Check HERMES_HOME and its permissions."
    return PreflightError(f"The run could not be started: {reason}.", hint=hint)


def _spawn(home: Home, paths: RunPaths, lock: locks.HeldLock, environ: Mapping[str, str]) -> threading.Thread:
    """Starts the supervisor in a session of its own. The returned thread ends when it does, and leaves no zombie."""
    log = home.log("supervisor", paths.run_id)
    try:
        with open(log, "ab", opener=private) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hermes_rl_mcp.runs", str(paths.dir), "--lock-fd", str(lock.fd)],
                env=supervisor_environ(home, environ),
                cwd=paths.dir,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock.fd,),
            )
    except OSError as error:
        lock.release()
        problem = _no_start(f"its supervisor could not be started: {error.strerror or error}", error)
        fail(paths, "supervisor not started", problem.message, problem.hint)
        raise problem from error
    else:
        lock.release()  # the supervisor has its own descriptor of the same lock
    reaper = threading.Thread(target=process.wait, name=f"reap-{paths.run_id}", daemon=True)
    reaper.start()
    return reaper


async def _taken_over(
    home: Home, paths: RunPaths, supervisor: threading.Thread, wait_s: float, known: RunRecord | None = None
) -> RunRecord:
    deadline = time.monotonic() + wait_s
    known_supervisor = known.supervisor if known else None
    while True:
        ended = not supervisor.is_alive()  # looked at before the record, so that a last write is seen
        try:
            record = read_record(paths)
        except RecordReadError as unread:
            if time.monotonic() >= deadline:
                raise UnreadableRunError(paths.run_id, str(unread), str(paths.dir), UNKNOWN) from unread
            await anyio.sleep(_POLL_S)
            continue
        if (record.supervisor != known_supervisor and _placed(record)) or time.monotonic() >= deadline:
            return record
        if ended:
            break
        await anyio.sleep(_POLL_S)
    log = home.log("supervisor", paths.run_id)
    tail = redact_text(read_tail(log, _TAIL_BYTES))
    error = f"The supervisor of run {paths.run_id} died at once. Its log ends:\n{tail}"
    hint = f"See {log}."
    fail(paths, "supervisor died at once", error, hint)
    raise PreflightError(error, hint=hint, details={"run_id": paths.run_id})


def _placed(record: RunRecord) -> bool:
    """Whether it is decided that it has the device, or which place in the queue."""
    return record.status is not RunStatus.QUEUED or record.queue_position is not None

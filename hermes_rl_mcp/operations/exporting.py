"""Exports by tool: the program behind ``hermes-rl export``, detached, with its state on disk.

Whether an export goes on is whether its lock is held: the launcher hands the lock to the program, so there is no moment
without an answer, whoever dies. It is done when its folder holds a record that was not there before. Nothing here is
remembered: every server sees the same.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import anyio
from pydantic import ValidationError

from hermes_rl_mcp.checkpoints import Marked
from hermes_rl_mcp.contracts.exports import CONVERTERS, ExportFormat, ExportRequest, ExportState
from hermes_rl_mcp.contracts.records import ExportRecord
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.errors import ConfirmationError, InvalidValueError, PreflightError
from hermes_rl_mcp.files import make_private_dir, now, private, read_file, read_tail, write_atomic
from hermes_rl_mcp.operations.asking import Caller, is_anothers, overwrite_question, starter, stop_export_question
from hermes_rl_mcp.operations.children import program_environ
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader, known_secrets
from hermes_rl_mcp.redact import redact_text
from hermes_rl_mcp.runs import locks, reserve
from hermes_rl_mcp.runs.process import MARKER, end_all, marked

log = logging.getLogger(__name__)

_RECORD = "export.json"
_WORD = {"adapter": "adapter", "safetensors": "merged", "gguf": "gguf"}
"""In names of folders, as ``hermes-rl export`` has them."""
_SHOWN = 10
_PROBE_S = 1.0
"""A reader that looks whether a lock is held holds it for an instant."""
_TERM_S, _KILL_S = 5.0, 5.0
_TAIL_BYTES = 4096
_ERROR, _HINT, _DOING = "Error: ", "What to do: ", "... "
"""How lines of the program begin."""


async def start_export(
    context: Context, run_id: str, kind: ExportFormat, caller: Caller | None = None, confirm: bool = False
) -> tuple[RunRecord, ExportState]:
    """Exports the newest complete checkpoint of a run, in the background. One that is under way is not begun twice.

    Raises ConfirmationError if it would replace an earlier export, unless ``confirm`` says that a person agreed;
    PreflightError if there is nothing to export, or no converter for GGUF.
    """
    record = (await RunReader.open(context, run_id)).record
    return record, await anyio.to_thread.run_sync(partial(_begin, context, run_id, kind, caller, confirm))


async def stop_exports(
    context: Context, run_id: str, caller: Caller | None = None, confirm: bool = False
) -> list[ExportState]:
    """Ends what is under way. Returns what was. Raises ConfirmationError for an export of another client."""
    return await anyio.to_thread.run_sync(_stop, context, run_id, caller, confirm)


def exports(context: Context, run_id: str) -> list[ExportState]:
    """Of one run, newest first; those of ``hermes-rl export`` lie where the person wanted them and are not known."""
    return [_state(context, request) for request in _requests(context, run_id)[:_SHOWN]]


def _begin(context: Context, run_id: str, kind: ExportFormat, caller: Caller | None, confirm: bool) -> ExportState:
    newest = _newest(context, run_id)
    _require_converter(context, kind)
    name = f"step-{newest.marker.step}-{_WORD[kind]}"
    folder = context.home.run(run_id).exports
    try:
        make_private_dir(folder)
        make_private_dir(context.home.exports)
        lock = locks.take(_lock(context, run_id, name), timeout_s=_PROBE_S)
        if lock is None:
            return _under_way(context, run_id, name)
        try:
            request = _request(context, run_id, kind, newest.marker.step, name, caller, confirm)
            _clear(request)
            write_atomic(folder / f"{name}.json", request.model_dump_json(indent=1))
            _spawn(context, request, lock)
        finally:
            lock.release()  # the program has its own descriptor of the same lock
    except OSError as error:
        hint = "Free some disk space" if reserve.is_full(error) else "Check HERMES_HOME and its permissions"
        raise PreflightError(
            f"The export could not be started: {error.strerror or error} ({error.filename or folder}).",
            hint=f"{hint}, then start it again.",
        ) from error
    return _state(context, request)


def _under_way(context: Context, run_id: str, name: str) -> ExportState:
    for state in exports(context, run_id):
        if state.name == name:
            return state
    raise PreflightError(
        f"The export {name} of run {run_id} is just being started by another server.",
        hint="Look with rl_get_results(run_id) in a moment.",
    )


def _newest(context: Context, run_id: str) -> Marked:
    found = context.runs.checkpoints(run_id)
    if not found:
        raise PreflightError(
            f"Run {run_id} has no complete checkpoint, so there is nothing to export.",
            hint="While it goes on, follow it with rl_check_status; it writes one every "
            "save_checkpoint_interval steps and at its end. rl_list_runs shows other runs.",
        )
    return found[-1]


def _require_converter(context: Context, kind: ExportFormat) -> None:
    path = context.operator.environ.get("PATH")
    if kind == "gguf" and not any(shutil.which(name, path=path) for name in CONVERTERS):
        raise PreflightError(
            f"GGUF needs llama.cpp's converter, and there is no {CONVERTERS[0]} on the server's PATH.",
            hint="Use export_format='safetensors', or ask the person who runs this server to name llama.cpp's folder: "
            "hermes-rl config set HERMES_RL_PATH /path/to/llama.cpp",
        )


def _request(
    context: Context, run_id: str, kind: ExportFormat, step: int, name: str, caller: Caller | None, confirm: bool
) -> ExportRequest:
    path = context.home.exports / f"{run_id}-{name}"
    there = _made(path)
    if there is not None and not confirm:
        raise ConfirmationError(overwrite_question(str(path), there.created_at))
    if there is None and os.path.lexists(path):
        raise InvalidValueError(
            f"{path} exists already, and it is no earlier export.", hint="Move it away, then start the export again."
        )
    return ExportRequest(
        run_id=run_id,
        name=name,
        format=kind,
        step=step,
        path=str(path),
        requested_at=now(),
        started_by=starter(caller),
        mark=f"export-{run_id}-{name}-{secrets.token_hex(8)}",
        replaces=there.created_at if there else None,
    )


def _spawn(context: Context, request: ExportRequest, lock: locks.HeldLock) -> None:
    """In a session of its own: it neither dies with this server nor holds its pipes."""
    arguments = ["--run", str(context.home.run(request.run_id).dir), "--output", request.path]
    arguments += ["--step", str(request.step), "--format", request.format]
    arguments += ["--force"] if request.replaces else []
    output = _log(context, request)
    output.unlink(missing_ok=True)  # that of an earlier try would be taken for this one's
    with open(output, "ab", opener=private) as written:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.export", *arguments],
            env={**program_environ(context.home, context.operator.environ), MARKER: request.mark},
            cwd=context.home.exports,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock.fd,),
        )
    threading.Thread(target=process.wait, name=f"reap {request.name}", daemon=True).start()


def _stop(context: Context, run_id: str, caller: Caller | None, confirm: bool) -> list[ExportState]:
    running = [one for one in _requests(context, run_id) if locks.is_held(_lock(context, run_id, one.name))]
    for one in running:
        if caller is not None and not confirm and is_anothers(one.started_by, caller):
            raise ConfirmationError(stop_export_question(run_id, one.name, one.started_by, caller))
    return [_end(context, one) for one in running]


def _end(context: Context, request: ExportRequest) -> ExportState:
    request = request.model_copy(update={"stopped": True})
    write_atomic(_file(context, request), request.model_dump_json(indent=1))
    lock = _lock(context, request.run_id, request.name)
    deadline = time.monotonic() + _TERM_S + _KILL_S
    while locks.is_held(lock) and time.monotonic() < deadline:
        end_all(marked(request.mark), term_s=_TERM_S, kill_s=_KILL_S)
    state = _state(context, request)
    if state.status == "running":
        log.error("the export %s of run %s does not end", request.name, request.run_id)
    else:
        _clear(request)
    return state


def _clear(request: ExportRequest) -> None:
    """What a program left that was killed at work. Only while nobody works on this export."""
    path = Path(request.path)
    for left in path.parent.glob(f".{path.name}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)


def _requests(context: Context, run_id: str) -> list[ExportRequest]:
    """Newest first; a damaged one is left out."""
    found = []
    for path in context.home.run(run_id).exports.glob("*.json"):
        try:
            found.append(ExportRequest.model_validate_json(read_file(path)))
        except (OSError, ValidationError) as error:
            log.warning("ignoring %s: %s", path, error)
    return sorted(found, key=lambda one: (one.requested_at, one.name), reverse=True)


def _state(context: Context, request: ExportRequest) -> ExportState:
    state = ExportState(
        name=request.name,
        format=request.format,
        step=request.step,
        status="running",
        path=request.path,
        log=str(_log(context, request)),
        requested_at=request.requested_at,
    )
    held = locks.is_held(_lock(context, request.run_id, request.name))  # before the folder: it is there by the end
    lines = _words(context, request)
    if held:
        doing = [line.removeprefix(_DOING) for line in lines if line.startswith(_DOING)]
        return state.model_copy(update={"note": doing[-1] if doing else "starting"})
    made = _made(Path(request.path))
    if made is not None and made.created_at != request.replaces and made.run_id == request.run_id:
        return state.model_copy(update={"status": "completed", "note": made.note})
    if request.stopped:
        return state.model_copy(update={"status": "stopped"})
    said = {key: [line.removeprefix(key) for line in lines if line.startswith(key)] for key in (_ERROR, _HINT)}
    error = said[_ERROR][-1] if said[_ERROR] else (lines[-1] if lines else "It ended without a word.")
    hint = said[_HINT][-1] if said[_HINT] else "See its log, then start it again."
    return state.model_copy(update={"status": "failed", "error": error, "hint": hint})


def _made(path: Path) -> ExportRecord | None:
    try:
        return ExportRecord.model_validate_json(read_file(path / _RECORD))
    except (OSError, ValidationError):
        return None


def _words(context: Context, request: ExportRequest) -> list[str]:
    text = redact_text(read_tail(_log(context, request), _TAIL_BYTES), known_secrets(context, request.run_id))
    return [line.strip() for line in text.splitlines() if line.strip()]


def _file(context: Context, request: ExportRequest) -> Path:
    return context.home.run(request.run_id).exports / f"{request.name}.json"


def _log(context: Context, request: ExportRequest) -> Path:
    return context.home.run(request.run_id).exports / f"{request.name}.log"


def _lock(context: Context, run_id: str, name: str) -> Path:
    return context.home.run(run_id).exports / f"{name}.lock"

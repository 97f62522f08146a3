"""The read side of runs: everything that can be shown of them comes from their directories.

It never changes a file, with one exception: a run whose supervisor is gone is closed (``reconcile``). A record that
cannot be read is shown as ``Unreadable`` and left alone; it does not keep other runs from being shown. A read that
fails for a moment is repeated, and says nothing about the run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import anyio
from anyio import to_thread
from pydantic_core import from_json

from hermes_rl_mcp.checkpoints import Marked, complete
from hermes_rl_mcp.contracts.runs import UNKNOWN, UNREADABLE, ChildReport, ProcessName, RunRecord, RunStatus
from hermes_rl_mcp.errors import UnknownRunError, UnreadableRunError
from hermes_rl_mcp.files import opened
from hermes_rl_mcp.paths import RUN_ID, Home, RunPaths
from hermes_rl_mcp.runs import outcome
from hermes_rl_mcp.runs.json_lines import json_object, may_be_large
from hermes_rl_mcp.runs.process import boot_id
from hermes_rl_mcp.runs.reconcile import reconcile
from hermes_rl_mcp.runs.state import RecordReadError, UnreadableRecordError, read_record

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_MAX_READ_BYTES = 32 * 2**20
"""Of one JSONL file per call; the rest comes with the next call."""
_RECENT_BYTES = 128 * 2**10
"""Of the end of metrics.jsonl: a line has about one kilobyte, with many reward parts some."""
_EVALUATION_BYTES = 512 * 2**10
"""Of the end of env_metrics.jsonl: a thousand lines, more than lie between two evaluations."""
_EVALUATION = "eval/percent_correct"
_READ_AGAIN_S = (0.02, 0.1, 0.3)
"""Pauses before a failed read is repeated; a network file system that takes longer makes the run ``unknown``."""


class Unreadable(NamedTuple):
    """A run directory whose record cannot be read."""

    run_id: str
    reason: str
    label: str = UNREADABLE
    """Shown as its status; ``unknown`` if the next read may succeed."""


class Lines(NamedTuple):
    """Objects of a JSONL file, and the offset at which to go on next time."""

    lines: list[dict[str, Any]]
    offset: int


# Inside RunStore the name ``list`` is its method.
Checkpoints = list[Marked]
Records = list[RunRecord]
Ids = list[str]
Objects = list[dict[str, Any]]


class RunStore:
    """Runs of one home. Cheap to make; keeps nothing between calls."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def list(self) -> list[RunRecord | Unreadable]:
        """All runs, newest first."""
        found: list[tuple[str, str, RunRecord | Unreadable]] = []
        for run_id in self.ids():
            try:
                record = self._read(run_id)
                found.append((record.created_at, run_id, record))
            except UnreadableRecordError as error:
                found.append((self._changed_at(run_id), run_id, Unreadable(run_id, str(error), _label(error))))
        return [run for _, _, run in sorted(found, key=lambda row: row[:2], reverse=True)]

    def get(self, run_id: str) -> RunRecord:
        """One run. Raises UnknownRunError (with the active runs) or UnreadableRunError.

        May take some seconds, once, if the run's supervisor died and left stubborn processes.
        """
        paths = self._paths(run_id)
        try:
            return self._read(run_id)
        except UnreadableRecordError as error:
            raise UnreadableRunError(run_id, str(error), str(paths.dir), _label(error)) from None

    def active(self) -> Records:
        """Runs that have not ended, newest first."""
        return [run for run in self.list() if isinstance(run, RunRecord) and not run.status.terminal]

    def paths(self, run_id: str) -> RunPaths:
        """Where the run's files are. Raises UnknownRunError."""
        return self._paths(run_id)

    def metrics(self, run_id: str, since_offset: int = 0) -> Lines:
        """Steps by the trainer. A torn last line is left for next time."""
        return _read_lines(self._paths(run_id).metrics, since_offset)

    def every(self, path: Path) -> Objects:
        """All objects of one of a run's JSONL files, oldest first."""
        lines: Objects = []
        offset = 0
        while True:  # a long file comes in parts
            part = _read_lines(path, offset)
            lines.extend(part.lines)
            if part.offset == offset:
                return lines
            offset = part.offset

    def latest(self, run_id: str) -> dict[str, Any] | None:
        """The last step's metrics, without reading the steps before it."""
        return outcome.last_metric(self._paths(run_id).metrics)

    def recent(self, run_id: str, count: int) -> Objects:
        """The last steps, at most ``count`` of them, oldest first; the same time for a long run as for a short one."""
        text = outcome.tail(self._paths(run_id).metrics, _RECENT_BYTES)
        return _objects([line.encode() for line in text.splitlines()[-count - 1 :]])[-count:]

    def last_evaluation(self, run_id: str) -> float | None:
        """The environment's last ``eval/percent_correct``."""
        text = outcome.tail(self._paths(run_id).env_metrics, _EVALUATION_BYTES)
        for line in reversed(text.splitlines()) if _EVALUATION in text else ():
            value = (json_object(line) or {}).get(_EVALUATION) if _EVALUATION in line else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    def checkpoints(self, run_id: str) -> Checkpoints:
        """Finished checkpoints by step. A folder without a valid marker, or that lacks a file it names, is none."""
        return complete(self._paths(run_id).checkpoints)

    def report(self, run_id: str, process: ProcessName) -> ChildReport | None:
        """What a child said of its own end; for the trainer the completion record."""
        return outcome.read_report(self._paths(run_id), process)

    async def wait_change(self, run_id: str, last_revision: int, last_step: int, timeout_s: float) -> RunRecord:
        """Returns as soon as the record's revision or the step exceeds what the caller saw, or at the timeout."""
        deadline = time.monotonic() + timeout_s
        paths = self._paths(run_id)
        while True:
            record = await to_thread.run_sync(self.get, run_id)
            changed = record.revision > last_revision or outcome.steps_done(paths) > last_step
            if changed or record.status.terminal or time.monotonic() >= deadline:
                return record
            await anyio.sleep(_POLL_S)

    def ids(self) -> Ids:
        """Of all run directories, in no order."""
        try:
            with os.scandir(self._home.runs) as entries:
                return [one.name for one in entries if RUN_ID.match(one.name) and one.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def _paths(self, run_id: str) -> RunPaths:
        if RUN_ID.match(run_id) and (paths := self._home.run(run_id)).dir.is_dir() and not paths.dir.is_symlink():
            return paths
        raise UnknownRunError(run_id, [run.run_id for run in self.active()])

    def _read(self, run_id: str) -> RunRecord:
        paths = self._home.run(run_id)
        record = _read_patiently(paths)
        try:
            record = reconcile(paths, record)
        except (OSError, RecordReadError) as error:  # a full disk must not hide this run, nor the others
            _log.warning("run %s has lost its supervisor and cannot be closed now: %s", run_id, error)
        if record.status.terminal:  # most are, and copies cost a fifth of the time of a long list
            return record
        return record.model_copy(update={"running_seconds": _running_seconds(record)})

    def _changed_at(self, run_id: str) -> str:
        return datetime.fromtimestamp(self._home.run(run_id).dir.stat().st_mtime, UTC).isoformat()


def _label(error: UnreadableRecordError) -> str:
    return UNKNOWN if isinstance(error, RecordReadError) else UNREADABLE


def _read_patiently(paths: RunPaths) -> RunRecord:
    for pause_s in _READ_AGAIN_S:
        try:
            return read_record(paths)
        except RecordReadError:
            time.sleep(pause_s)
    return read_record(paths)


def _running_seconds(record: RunRecord) -> float:
    """The record is written at changes only. The clock it was begun by does not move when the time is set."""
    going = record.status in (RunStatus.RUNNING, RunStatus.STOPPING)
    here = record.supervisor is not None and record.supervisor.boot_id == boot_id()
    if not going or not here or record.running_clock is None:
        return record.running_seconds
    return max(record.running_seconds, time.monotonic() - record.running_clock)


def _read_lines(path: Path, offset: int) -> Lines:
    try:
        with opened(path) as file:
            file.seek(offset)
            data = file.read(_MAX_READ_BYTES)
    except OSError:  # not there yet, or nothing that can be read
        return Lines([], offset)
    whole = data[: data.rfind(b"\n") + 1]
    return Lines(_objects(whole.splitlines()), offset + len(whole))


def _objects(lines: Sequence[bytes]) -> Objects:
    """All at once if every line is as our trainer writes it, which is quicker; else what can be read of them."""
    joined = b"[" + b",".join(lines) + b"]"
    try:
        found = [] if may_be_large(joined) else from_json(joined, allow_inf_nan=False)
    except ValueError:
        found = []
    if len(found) == len(lines) and all(isinstance(one, dict) for one in found):
        return cast(Objects, found)
    return [one for line in lines if (one := json_object(line)) is not None]

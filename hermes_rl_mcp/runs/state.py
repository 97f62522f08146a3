"""The record of a run and how it may change: the only code that writes ``run.json`` and ``events.jsonl``.

::

    queued --> starting --> running --> completed
      |  \\        |  \\         |  \\
      |   \\       |   \\        |   `-> failed
      v    v       v    v       v
    stopping <-----+----+-------+     stopping --> stopped | completed | failed
                                      any of these --> interrupted (only by a reader that found no supervisor)

``completed stopped failed interrupted`` absorb. The writer holds the run's supervisor lock, and compares the revision
on disk before each write, so a record is never overwritten by somebody who has not seen it.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.runs import SCHEMA_VERSION, Event, ProcessName, RunRecord, RunStatus
from hermes_rl_mcp.files import append_line, now, write_atomic
from hermes_rl_mcp.paths import RunPaths

_log = logging.getLogger(__name__)

S = RunStatus
_ENDS = {S.FAILED, S.INTERRUPTED}
MOVES: dict[RunStatus, set[RunStatus]] = {
    S.QUEUED: {S.STARTING, S.STOPPING, *_ENDS},
    S.STARTING: {S.RUNNING, S.STOPPING, S.COMPLETED, *_ENDS},
    S.RUNNING: {S.STOPPING, S.COMPLETED, *_ENDS},
    S.STOPPING: {S.STOPPED, S.COMPLETED, *_ENDS},
    S.STOPPED: set(),
    S.COMPLETED: set(),
    S.FAILED: set(),
    S.INTERRUPTED: set(),
}


class UnreadableRecordError(Exception):
    """``run.json`` is absent, damaged, or from a later version. Its text is the reason."""


class StateConflictError(RuntimeError):
    """A write that the state machine or the revision on disk forbids: a defect, or a second writer."""


def read_record(paths: RunPaths) -> RunRecord:
    """The record on disk. Raises UnreadableRecordError; never changes the file."""
    try:
        record = RunRecord.model_validate_json(paths.record.read_bytes())
    except FileNotFoundError:
        raise UnreadableRecordError("run.json is missing") from None
    except ValidationError as error:
        version = _schema_version(paths)
        if version > SCHEMA_VERSION:
            reason = f"run.json has schema version {version}; this program reads up to {SCHEMA_VERSION}"
            raise UnreadableRecordError(reason) from None
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnreadableRecordError(f"run.json is damaged: {where + ': ' if where else ''}{first['msg']}") from None
    except OSError as error:
        raise UnreadableRecordError(f"run.json cannot be read: {error.strerror or error}") from None
    if record.schema_version > SCHEMA_VERSION:
        raise UnreadableRecordError(
            f"run.json has schema version {record.schema_version}; this program reads up to {SCHEMA_VERSION}"
        )
    if record.run_id != paths.run_id:
        raise UnreadableRecordError(f"run.json is that of run {record.run_id}")
    return record


def _schema_version(paths: RunPaths) -> int:
    """Of a record with fields that we do not know."""
    try:
        value = json.loads(paths.record.read_bytes())["schema_version"]
    except (ValueError, KeyError, TypeError, OSError):
        return 0
    return value if isinstance(value, int) else 0


class RunState:
    """The writer's side of one run's record. Whoever makes one holds the run's supervisor lock."""

    def __init__(self, paths: RunPaths, record: RunRecord, next_seq: int) -> None:
        self._paths = paths
        self._record = record
        self._next_seq = next_seq
        self._running_since: float | None = None  # monotonic

    @classmethod
    def create(cls, paths: RunPaths, record: RunRecord, reason: str) -> RunState:
        """Writes the first record of a new run."""
        state = cls(paths, record, 1)
        state._append(record.status, reason)
        state._write(record)
        return state

    @classmethod
    def load(cls, paths: RunPaths) -> RunState:
        """Takes over a run's record. Raises UnreadableRecordError."""
        return cls(paths, read_record(paths), _count_lines(paths) + 1)

    @property
    def record(self) -> RunRecord:
        return self._record

    def move(self, to: RunStatus, reason: str, **changes: Any) -> None:
        """Changes the status, with other fields at the same time. StateConflictError if that is not allowed."""
        if to not in MOVES[self._record.status]:
            raise StateConflictError(f"run {self._record.run_id}: {self._record.status} cannot become {to} ({reason})")
        if to is S.RUNNING:
            self._running_since = time.monotonic()
            changes["running_since"] = now()
        if to.terminal:
            changes |= {"ended_at": now(), "detail": "", "queue_position": None}
        self._check_revision()
        self._append(to, reason)  # before the record: whoever sees a state finds the reason for it
        self._change({"status": to, **changes})

    def update(self, **changes: Any) -> None:
        """Changes other fields than the status; writes nothing if they are as they were."""
        if self._record.status.terminal:
            raise StateConflictError(f"run {self._record.run_id} has ended; its record is closed")
        if any(getattr(self._record, name) != value for name, value in changes.items()):
            self._change(changes)

    def update_process(self, name: ProcessName, **changes: Any) -> None:
        """Changes fields of one child's record."""
        process = self._record.processes[name].model_copy(update=changes)
        self.update(processes={**self._record.processes, name: process})

    def note(self, reason: str) -> None:
        """One line of events.jsonl."""
        self._append(self._record.status, reason)

    def _append(self, status: RunStatus, reason: str) -> None:
        event = Event(seq=self._next_seq, time=now(), status=status, reason=reason)
        append_line(self._paths.events, event.model_dump_json())
        self._next_seq += 1

    def _check_revision(self) -> None:
        try:
            on_disk = read_record(self._paths)
        except UnreadableRecordError as error:  # it is ours alone, so whatever damaged it has nothing to say
            _log.warning("run %s: %s; writing it anew", self._record.run_id, error)
            return
        if on_disk.revision != self._record.revision:
            raise StateConflictError(
                f"run {self._record.run_id}: revision {on_disk.revision} on disk, {self._record.revision} expected"
            )

    def _change(self, changes: dict[str, Any]) -> None:
        self._check_revision()
        if self._running_since is not None:
            changes["running_seconds"] = round(time.monotonic() - self._running_since, 3)
        self._write(self._record.model_copy(update=changes, deep=True))

    def _write(self, record: RunRecord) -> None:
        record = RunRecord.model_validate({**record.model_dump(), "revision": self._record.revision + 1})
        write_atomic(self._paths.record, record.model_dump_json(indent=1))
        self._record = record


def _count_lines(paths: RunPaths) -> int:
    try:
        return paths.events.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0

"""The record of a run and how it may change: the only code that writes ``run.json`` and ``events.jsonl``.

::

                 .--------------------------------------------> interrupted   (by a reader that found no supervisor)
                 |           |            |            |
    (new) --> queued --> starting --> running     stopping --> stopped
                 |           |            |       ^    |
                 |           |            |       |    |------> completed
                 |-----------|------------|-------'    |
                 |           |            |            '------> failed
                 |           |            |
                 |           '------------|-------------------> completed    (the trainer left its completion record)
                 '------------------------'-------------------> failed

``completed stopped failed interrupted`` absorb. Not states but flags: ``stalled`` (of a running run; nothing moves,
and it is taken back when something does) and ``leftover_pids`` (of an ended one). The writer holds the run's supervisor
lock, and compares the revision on disk before each write, so a record is never overwritten by somebody who has not
seen it. An event and the change it tells of are both on disk, or neither; and the closing record of a run is written
even on a full disk (``reserve``).
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.runs import SCHEMA_VERSION, Event, ProcessName, RunRecord, RunStatus
from hermes_rl_mcp.files import NotAFileError, append_line, now, read_file, read_tail, write_atomic
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs import reserve

_log = logging.getLogger(__name__)

_EVENT_BYTES = 16_384
"""No event is longer."""

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


class RecordReadError(UnreadableRecordError):
    """Reading failed, which says nothing about the record: a network file system may deliver it a second later."""


class StateConflictError(RuntimeError):
    """A write that the state machine or the revision on disk forbids: a defect, or a second writer."""


def read_record(paths: RunPaths) -> RunRecord:
    """The record on disk. Raises UnreadableRecordError; never changes the file."""
    try:
        record = RunRecord.model_validate_json(read_file(paths.record))
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
    except NotAFileError as error:
        raise UnreadableRecordError(f"run.json is damaged: {error.reason}") from None
    except OSError as error:
        raise RecordReadError(f"run.json cannot be read now: {error.strerror or error}") from None
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
        value = json.loads(read_file(paths.record))["schema_version"]
    except (ValueError, KeyError, TypeError, OSError):
        return 0
    return value if isinstance(value, int) else 0


class RunState:
    """The writer's side of one run's record. Whoever makes one holds the run's supervisor lock."""

    def __init__(self, paths: RunPaths, record: RunRecord, next_seq: int) -> None:
        self._paths = paths
        self._record = record
        self._next_seq = next_seq
        self._running_since: float | None = None  # monotonic; only of a run that this process brought up
        self._ending = self._abandoned = False
        self._unwritten: list[str] = []
        """Events that found no room."""
        self._announced: RunStatus | None = None

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
        last = _last_event(paths)
        state = cls(paths, read_record(paths), last.seq + 1 if last else 1)
        if last and last.status.terminal and not state.record.status.terminal:
            state._announced = last.status
        return state

    @property
    def record(self) -> RunRecord:
        return self._record

    @property
    def announced(self) -> RunStatus | None:
        """The end that the last event tells of, if its writer died before it was in the record. It is to be moved to;
        that makes no second event."""
        return self._announced

    def begin_end(self) -> None:
        """From now on only the closing record counts: what cannot be written before goes with it."""
        self._ending = True

    def abandon(self) -> None:
        """The run's directory is gone: nothing is read or written any more."""
        self._ending = self._abandoned = True

    def move(self, to: RunStatus, reason: str, **changes: Any) -> None:
        """Changes the status, with other fields at the same time. StateConflictError if that is not allowed; after an
        OSError nothing is changed."""
        if to not in MOVES[self._record.status]:
            raise StateConflictError(f"run {self._record.run_id}: {self._record.status} cannot become {to} ({reason})")
        if to is S.RUNNING:
            self._running_since = time.monotonic()
            changes |= {"running_since": now(), "running_clock": self._running_since}
        if to.terminal:
            self.begin_end()
            changes |= {"ended_at": now(), "detail": "", "queue_position": None}
            changes |= {"stalled": False, "stalled_reason": None}
        self._check_revision()
        before = (self._next_seq, list(self._unwritten), _size(self._paths))
        if to is not self._announced:
            self._append(to, reason)  # before the record: whoever sees a state finds the reason for it
        try:
            self._change({"status": to, **changes})
        except OSError:
            self._take_back(*before)
            raise

    def update(self, **changes: Any) -> None:
        """Changes other fields than the status; writes nothing if they are as they were."""
        if self._record.status.terminal:
            raise StateConflictError(f"run {self._record.run_id} has ended; its record is closed")
        if any(getattr(self._record, name) != value for name, value in changes.items()):
            self._check_revision()
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
        self._unwritten.append(event.model_dump_json())
        self._next_seq += 1
        try:
            self._write_events()
        except OSError as error:
            if not self._ending:
                self._unwritten.pop()
                self._next_seq -= 1
                raise
            _log.warning("run %s: an event has to wait: %s", self._record.run_id, error)

    def _write_events(self) -> None:
        if self._unwritten and not self._abandoned:
            append_line(self._paths.events, "\n".join(self._unwritten))
            self._unwritten.clear()

    def _take_back(self, next_seq: int, unwritten: list[str], size: int) -> None:
        """The event of a change that did not come about."""
        self._next_seq, self._unwritten = next_seq, unwritten
        with suppress(OSError):
            os.truncate(self._paths.events, size)

    def _check_revision(self) -> None:
        if self._abandoned:
            return
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
        if self._running_since is not None:
            changes["running_seconds"] = round(time.monotonic() - self._running_since, 3)
        self._write(self._record.model_copy(update=changes, deep=True))

    def _write(self, record: RunRecord) -> None:
        record = RunRecord.model_validate({**record.model_dump(), "revision": self._record.revision + 1})
        if not self._abandoned:
            record = self._on_disk(record)
        self._record = record

    def _on_disk(self, record: RunRecord) -> RunRecord:
        """Writes ``record``. Returns it as it counts from now on."""
        text = record.model_dump_json(indent=1)
        try:
            write_atomic(self._paths.record, text)
        except OSError as error:
            if not record.status.terminal:
                if not self._ending:
                    raise
                _log.warning("run %s: its record has to wait: %s", record.run_id, error)
                return record.model_copy(update={"revision": self._record.revision})  # not on disk, nor is its number
            if not reserve.is_full(error):
                raise
            self._spend_reserve(text, error)
        if record.status.terminal:
            self._write_what_fits()
            with suppress(OSError):
                self._paths.reserve.unlink(missing_ok=True)
        return record

    def _spend_reserve(self, text: str, full: OSError) -> None:
        try:
            reserve.spend(self._paths.reserve, self._paths.record, text, self._write_what_fits)
        except OSError as error:  # none there, or a file system that cannot write in place
            raise full from error

    def _write_what_fits(self) -> None:
        try:
            self._write_events()
        except OSError as error:  # the record says the same
            _log.warning("run %s: %d events could not be written: %s", self._record.run_id, len(self._unwritten), error)


def _size(paths: RunPaths) -> int:
    try:
        return paths.events.stat().st_size
    except FileNotFoundError:
        return 0


def _last_event(paths: RunPaths) -> Event | None:
    """The last whole one; a line that was damaged by a power failure is none."""
    try:
        lines = read_tail(paths.events, 2 * _EVENT_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with suppress(ValidationError):
            return Event.model_validate_json(line)
    return None

"""The journal: every event as one line of an append-only file, from which a restarted server takes up its state.

Invariant: ``append`` returns after the whole line is in the page cache, so a process that is killed loses nothing it
answered for; what a power cut can take is bounded by ``SYNC_INTERVAL_S``. A line is a JSON object that starts with the
checksum of what follows. Groups are written as the bytes they are. One process at a time holds the file (flock).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.groups import Group

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 0.1
"""Longest time for which an answered event is only in memory of the kernel."""
REWRITE_BYTES = 64 << 20
"""A journal is rewritten when it is this large and mostly of groups long trained."""
REWRITE_RATIO = 3

_PREFIX = b'{"crc":"%08x",'
_PREFIX_LENGTH = len(_PREFIX % 0)
_DATA = b',"data":['
_PLAIN: dict[str, Callable[..., events.Event]] = {
    "started": events.Started,
    "env_disconnected": events.EnvDisconnected,
    "returned": events.Returned,
    "written": events.Written,
    "acknowledged": events.Acknowledged,
    "forgotten": events.Forgotten,
    "reset": events.Reset,
}
"""Events whose fields are JSON values as they are."""
_KIND = {kind: name for name, kind in _PLAIN.items()}


class Journal:
    """Open file of events. ``append`` from one thread; a second thread of its own syncs and rewrites."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = _open_locked(path)
        self._size = os.lseek(self._fd, 0, os.SEEK_END)
        self._unsynced = threading.Event()
        self._closing = threading.Event()
        self._rewrite: list[events.Event] | None = None
        self._since_snapshot: list[bytes] | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> Iterator[events.Event]:
        """All events so far. A torn or damaged line ends the journal there: the rest is set aside and cut off."""
        good = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    event = decode(line)
                except ValueError as error:
                    self._cut(good, str(error))
                    return
                good += len(line)
                yield event

    def _cut(self, good: int, reason: str) -> None:
        rest = os.pread(self._fd, self._size - good, good)
        if rest.count(b"\n") > 1:  # more than a line torn by a crash: keep it for a person to look at
            self._path.with_suffix(".damaged").write_bytes(rest)
        log.warning("Journal: %s. The last %d bytes were cut off.", reason, len(rest))
        os.ftruncate(self._fd, good)
        self._size = good

    def start(self) -> None:
        """Begin to sync in the background; call after ``read``."""
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def append(self, event: events.Event) -> None:
        """Raises OSError, with the file as it was before, if the line cannot be written whole."""
        parts = encode(event)
        with self._lock:
            try:
                _write_all(self._fd, parts)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += sum(map(len, parts))
            if self._since_snapshot is not None:
                self._since_snapshot.append(b"".join(parts))
        self._unsynced.set()

    def needs_rewrite(self, live_bytes: int) -> bool:
        idle = self._since_snapshot is None
        return idle and self._size > REWRITE_BYTES and self._size > REWRITE_RATIO * live_bytes

    def rewrite(self, snapshot: Iterable[events.Event]) -> None:
        """Replace the file by these events and whatever is appended from now on. Returns at once."""
        with self._lock:
            self._rewrite = list(snapshot)
            self._since_snapshot = []
        self._unsynced.set()

    def close(self) -> None:
        self._closing.set()
        self._unsynced.set()
        if self._thread:
            self._thread.join()
        os.fsync(self._fd)
        os.close(self._fd)

    def _work(self) -> None:
        while not self._closing.is_set():
            self._unsynced.wait()
            self._unsynced.clear()
            try:
                if self._rewrite is not None:
                    self._replace(self._rewrite)
                os.fdatasync(self._fd)
            except OSError as error:
                log.error("Journal: cannot be brought to disk (%s). The run goes on; free some space.", error)
            self._closing.wait(SYNC_INTERVAL_S)

    def _replace(self, snapshot: list[events.Event]) -> None:
        self._rewrite = None
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fd = -1
        try:
            fd = _open_locked(fresh)
            size = sum(_write_all(fd, encode(event)) for event in snapshot)
            os.fsync(fd)
            with self._lock:
                size += _write_all(fd, self._since_snapshot or [])
                os.replace(fresh, self._path)
                fd, self._fd, self._size = self._fd, fd, size
        finally:
            self._since_snapshot = None
            if fd >= 0:
                os.close(fd)  # the old one; after a failure the new one
        _sync_folder(self._path.parent)


def encode(event: events.Event) -> list[bytes]:
    """One line, in parts so that groups need not be copied."""
    body = _body(event)
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return [_PREFIX % crc, *body]


def _body(event: events.Event) -> list[bytes]:
    match event:
        case events.Submitted(digest, groups):
            table = [[p.seq, p.buffered, p.group.env_id, p.group.size, len(p.group.raw)] for p in groups]
            head = _json({"kind": "submitted", "digest": digest, "groups": table})[1:-1]
            raws = [part for placed in groups for part in (placed.group.raw, b",")][:-1]
            return [head, _DATA, *raws, b"]}\n"]
        case events.Registered(registration, uuid, step):
            fields = {"kind": "registered", "registration": registration.model_dump(), "uuid": uuid, "step": step}
        case events.EnvRegistered(request, wandb_name):
            fields = {"kind": "env_registered", "request": request.model_dump(), "wandb_name": wandb_name}
        case events.Released(env_id, seqs):
            fields = {"kind": "released", "env_id": env_id, "seqs": seqs}
        case events.HandedOut(batch_id, leased, seqs):
            fields = {"kind": "handed_out", "batch_id": batch_id, "leased": leased, "seqs": seqs}
        case events.Kept(batch_id, step, seqs):
            fields = {"kind": "kept", "batch_id": batch_id, "step": step, "seqs": seqs}
        case events.Counted(step, next_seq, received, acknowledged):
            fields = {"kind": "counted", "step": step, "next_seq": next_seq, "received": received}
            fields["acknowledged"] = acknowledged
        case _:
            values = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
            fields = {"kind": _KIND[type(event)], **values}
    return [_json(fields)[1:], b"\n"]


def decode(line: bytes) -> events.Event:
    """Raises ValueError for a line that is torn or does not match its checksum."""
    body = line[_PREFIX_LENGTH:]
    if not line.endswith(b"\n") or line[:_PREFIX_LENGTH] != _PREFIX % zlib.crc32(body):
        raise ValueError("a line is torn or damaged")
    if body.startswith(b'"kind":"submitted"'):
        return _submitted(body)
    fields: dict[str, Any] = json.loads(b"{" + body)
    kind = fields.pop("kind")
    if kind == "registered":
        return events.Registered(Registration(**fields.pop("registration")), **fields)
    if kind == "env_registered":
        return events.EnvRegistered(RegisterEnv(**fields.pop("request")), **fields)
    if kind == "released":
        return events.Released(fields["env_id"], tuple(fields["seqs"]))
    if kind == "handed_out":
        return events.HandedOut(fields["batch_id"], fields["leased"], tuple(fields["seqs"]))
    if kind == "kept":
        return events.Kept(fields["batch_id"], fields["step"], tuple(fields["seqs"]))
    if kind == "counted":
        fields["acknowledged"] = tuple(fields["acknowledged"])
        return events.Counted(**fields)
    if kind in _PLAIN:
        return _PLAIN[kind](**fields)
    raise ValueError(f"a line is of the unknown kind {kind!r}; a later version wrote it")


def _submitted(body: bytes) -> events.Submitted:
    at = body.index(_DATA)
    head: dict[str, Any] = json.loads(b"{" + body[:at] + b"}")
    at += len(_DATA)
    groups = []
    for seq, buffered, env_id, size, length in head["groups"]:
        groups.append(events.Placed(seq, Group(body[at : at + length], size, env_id), buffered))
        at += length + 1
    return events.Submitted(head["digest"], tuple(groups))


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _open_locked(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise PreflightError(
            f"The journal {path} is in use by another rollout API.", hint="Stop that one or name another file."
        ) from None
    return fd


def _write_all(fd: int, parts: Iterable[bytes]) -> int:
    total = 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            written = os.write(fd, rest)
            rest = rest[written:]
            total += written
    return total


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

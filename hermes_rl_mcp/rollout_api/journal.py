"""The journal: every event as one line of an append-only file, from which a restarted server takes up its state.

Invariant: ``append`` returns after the whole line is in the page cache, so a process that is killed loses nothing it
answered for; and within ``SYNC_INTERVAL_S`` of that a sync of it begins, also while the file is rewritten, so that is
what a power cut can take. One process at a time holds the file (flock).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.journal_lines import DamagedError, LaterVersionError, decode, encode, head

log = logging.getLogger(__name__)

SYNC_INTERVAL_S = 0.1
"""Longest time for which an answered event is only in memory of the kernel."""
REWRITE_BYTES = 64 << 20
"""A journal is rewritten when it is this large and mostly of groups long trained."""
REWRITE_RATIO = 3


class Journal:
    """Open file of events. ``append`` from one thread; a thread of its own syncs, another rewrites."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._fd = _open_locked(path)
        self._size = os.lseek(self._fd, 0, os.SEEK_END)
        self._rewrite_from = REWRITE_BYTES
        self._unsynced = threading.Event()
        self._closing = threading.Event()
        self._since_snapshot: list[bytes] | None = None
        self._threads: list[threading.Thread] = []

    def read(self) -> Iterator[events.Event]:
        """All events so far. A torn or damaged line ends the journal there: the rest is set aside and cut off.

        Raises PreflightError, and leaves the file as it is, if a later version wrote it.
        """
        good = 0
        with self._path.open("rb") as file:
            for line in file:
                try:
                    event = decode(line)
                except DamagedError as error:
                    self._cut(good, str(error))
                    return
                except LaterVersionError as error:
                    raise PreflightError(
                        f"The journal {self._path} is of a later version: {error}. It was left as it is.",
                        hint="Use the version that wrote it, or move the file away to start with an empty queue.",
                    ) from None
                good += len(line)
                if event is not None:
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
        self._begin("sync", self._sync_often)

    def append(self, event: events.Event) -> None:
        """Raises OSError, with the file as it was before, if the line cannot be written whole."""
        parts = encode(event)
        with self._lock:
            if not self._size:
                parts.insert(0, head())
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
        return idle and self._size > self._rewrite_from and self._size > REWRITE_RATIO * live_bytes

    def rewrite(self, snapshot: Iterable[events.Event]) -> None:
        """Replace the file by these events and whatever is appended from now on. Returns at once."""
        with self._lock:
            self._since_snapshot = []
        self._begin("rewrite", partial(self._replace, list(snapshot)))

    def close(self) -> None:
        self._closing.set()
        self._unsynced.set()
        for thread in self._threads:
            thread.join()
        os.fsync(self._fd)
        os.close(self._fd)

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name=f"journal-{name}", daemon=True))
        self._threads[-1].start()

    def _sync_often(self) -> None:
        while not self._closing.is_set():
            self._unsynced.wait()
            began = self._clock()
            self._unsynced.clear()  # before the sync: what comes during it is for the next
            self._sync()
            self._pause(max(0.0, began + SYNC_INTERVAL_S - self._clock()))

    def _sync(self) -> None:
        with self._lock:
            fd = os.dup(self._fd)  # a rewrite may close the other meanwhile
        try:
            os.fdatasync(fd)
        except OSError as error:
            log.error("Journal: cannot be brought to disk (%s). The run goes on; free some space.", error)
        finally:
            os.close(fd)

    def _pause(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def _replace(self, snapshot: list[events.Event]) -> None:
        try:
            self._write_and_swap(snapshot)
        except OSError as error:
            self._rewrite_from = 2 * self._size  # not again and again into a full disk
            self._path.with_suffix(".new").unlink(missing_ok=True)
            log.error("Journal: cannot be rewritten (%s). It goes on growing; free some space.", error)
        finally:
            self._since_snapshot = None

    def _write_and_swap(self, snapshot: list[events.Event]) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fd = _open_locked(fresh)
        try:
            size = _write_all(fd, [head()])
            for event in snapshot:
                if self._closing.is_set():
                    fresh.unlink()
                    return
                size += _write_all(fd, encode(event))
            os.fsync(fd)
            while len(news := self._news()) > 1:  # meanwhile much may have come
                size += _write_all(fd, news)
                os.fdatasync(fd)
            with self._lock:
                size += _write_all(fd, [*news, *(self._since_snapshot or [])])
                os.fdatasync(fd)  # under the lock: what was on disk in the old file must be so in the new one
                os.replace(fresh, self._path)
                fd, self._fd, self._size = self._fd, fd, size
                self._rewrite_from = REWRITE_BYTES
        finally:
            os.close(fd)  # the old one; after a failure the new one
        _sync_folder(self._path.parent)

    def _news(self) -> list[bytes]:
        with self._lock:
            news, self._since_snapshot = self._since_snapshot or [], []
            return news


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

"""Small files that are replaced as a whole, lines and ends of files that grow, and the wall clock of records.

Invariant: a reader finds the old text or the new one, never a part; after a power failure, too, unless the caller does
not need that. What is made here is its owner's alone (0600, folders 0700), whatever the umask.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

RECORD_BYTES = 4 * 2**20
"""Largest record or configuration that is read whole; a real one has some kilobytes."""


class NotAFileError(OSError):
    """A link, pipe, socket, device or folder where a file should be, or a file larger than it may be."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(None, reason, str(path))
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.filename}: {self.reason}"


def now() -> str:
    """Wall clock for records, ISO 8601 in UTC. Durations come from ``time.monotonic``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def make_private_dir(path: Path) -> None:
    """Creates ``path`` and its missing parents."""
    missing = [path, *path.parents]
    for folder in reversed([folder for folder in missing if not folder.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, text: str | bytes, *, durable: bool = True) -> None:
    """Replaces ``path``. After a failure it is as it was and nothing is left beside it.

    Not ``durable``: does not wait for the disk, for what may be empty after a power failure.
    """
    with _written_aside(path, text, durable=durable) as aside:
        os.replace(aside, path)
    if durable:
        _sync_folder(path.parent)


def create_once(path: Path, text: str) -> bool:
    """Writes ``path`` unless it exists. Returns whether this call made it."""
    try:
        with _written_aside(path, text) as aside:
            os.link(aside, path)
    except FileExistsError:
        return False
    _sync_folder(path.parent)
    return True


def private(path: str, flags: int) -> int:
    """For ``open(..., opener=private)``: what it makes is its owner's alone. A pipe in its place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def append_line(path: Path, line: str) -> None:
    """One whole line in one write, so that a reader by byte offset never sees two halves. For files of one writer.

    OSError, and the file is as it was, if there is no room for all of it.
    """
    data = line.encode() + b"\n"
    fd = private(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        written = os.write(fd, data)
        if written < len(data):
            os.ftruncate(fd, os.fstat(fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path, *, inside: Path | None = None) -> Iterator[BinaryIO]:
    """A regular file for reading: never a pipe, which would block for ever, nor a device, whoever put it there.

    A link is not followed. With ``inside`` it is, if what was opened lies in that folder; that is asked of the open
    file, so a link or folder that changes between look and open changes nothing. Raises NotAFileError or OSError.
    """
    if not stat.S_ISREG(path.stat().st_mode if inside else path.lstat().st_mode):  # opening a device may do things
        raise NotAFileError(path, "not a regular file")
    follow = 0 if inside else os.O_NOFOLLOW
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotAFileError(path, "not a regular file")
        if inside is not None and not _real_path(file.fileno(), path).is_relative_to(os.path.realpath(inside)):
            raise NotAFileError(path, "a link that leads out of the folder; not followed")
        yield file


def read_file(path: Path, max_bytes: int = RECORD_BYTES, *, inside: Path | None = None) -> bytes:
    """A whole regular file of at most ``max_bytes``, as ``opened`` opens it."""
    with opened(path, inside=inside) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise NotAFileError(path, f"larger than {max_bytes} bytes")
    return data


def _real_path(fd: int, path: Path) -> Path:
    """Where an open file lies, links resolved."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:  # no /proc: the name once more, which must still mean the same file
        real = os.path.realpath(path)
        return Path(real) if os.path.samestat(os.stat(real), os.fstat(fd)) else Path()


def read_tail(path: Path, max_bytes: int) -> str:
    """The last ``max_bytes`` of a log as whole text: any bytes, any line endings; empty if there is no file."""
    try:
        with opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read(max_bytes)
    except FileNotFoundError:
        return ""
    lines = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if size > max_bytes and len(lines) > 1:
        lines = lines[1:]  # begins in the middle
    return "\n".join(line for line in lines if line)


def trim_log(path: Path, max_bytes: int, keep_bytes: int) -> bool:
    """Cuts a log that outgrew ``max_bytes`` down to its last ``keep_bytes``, which go to ``<name>.1``.

    Writers hold the file open for appending, so it is emptied in place; what they write in between is lost, and on a
    full disk so is the end that would have been kept.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        with opened(path) as file:
            file.seek(-keep_bytes, os.SEEK_END)
            kept = file.read(keep_bytes)
        with suppress(OSError), open(path.with_name(path.name + ".1"), "wb", opener=private) as older:
            older.write(kept)
        os.truncate(path, 0)
    except OSError:  # gone, or no file of ours; the next look may succeed
        return False
    return True


@contextmanager
def _written_aside(path: Path, text: str | bytes, *, durable: bool = True) -> Iterator[Path]:
    """A (synced) file beside ``path`` that holds ``text``; what is left of it goes after the block."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

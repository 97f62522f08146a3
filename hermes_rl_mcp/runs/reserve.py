"""Room on the disk that a run holds back for its own last words.

The reserve is a file of really allocated blocks. On a full disk the closing record is written over its blocks, cut to
length and renamed: that takes no free space, so whoever fills the disk meanwhile cannot prevent it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from hermes_rl_mcp.runs.forecast.device import free_disk_bytes

RESERVE_BYTES = 256 * 1024
"""A record has about 5 KiB; what is cut off is free for the event that explains it, and for the log's last line."""
FULL_BYTES = 64 * 1024
"""Less than this is a full disk: one step's metrics, rollouts and groups take more."""
LOW_BYTES = 50 * 2**20
"""Checkpoints of the built-in models and some hours of logs still fit; worth a note."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_WORDS = re.compile(r"no space left on device|disk quota exceeded|disk is full|storagefull", re.IGNORECASE)


def make(path: Path) -> None:
    """Allocates the reserve. OSError, and no file, if the disk does not give it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        elif os.write(fd, bytes(RESERVE_BYTES)) < RESERVE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def spend(path: Path, target: Path, text: str, before_it_shows: Callable[[], None]) -> None:
    """Makes ``target`` of the reserve, with ``text`` in it. ``before_it_shows`` runs when the rest of it is free again.

    OSError if there is no reserve, or if the file system needs new room even so; ``target`` is as it was then.
    """
    data = text.encode()
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size < len(data):
            raise OSError(errno.ENOSPC, "the reserve is spent", str(path))
        written = 0
        while written < len(data):
            written += os.pwrite(fd, data[written:], written)
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    before_it_shows()
    os.replace(path, target)


def is_full(error: BaseException) -> bool:
    """Whether a write failed because there is no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def says_full(text: str) -> bool:
    """The same, of a message."""
    return _FULL_WORDS.search(text) is not None


def fullest(folders: Iterable[Path]) -> tuple[int, Path]:
    """Free bytes for this user on the fullest of the file systems of these folders, and that folder."""
    return min((free_disk_bytes(folder), folder) for folder in folders)

"""Exclusive locks on files (flock). A lock lives exactly as long as some process holds its descriptor open.

The kernel drops it when the last holder dies, however it dies; so a held lock proves life, and one handed to a child
by descriptor is held until both are gone. Nothing here ever unlocks explicitly: that would unlock for all holders.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROBE_S = 0.5
"""Who looks whether a lock is held (``is_held``) holds it for that instant. Whoever must not take that for an owner
waits so long for it."""
_POLL_S = 0.02


@dataclass(frozen=True)
class HeldLock:
    """A lock that this process holds by ``fd``."""

    path: Path
    fd: int

    def release(self) -> None:
        os.close(self.fd)


def take(path: Path, *, timeout_s: float = 0.0) -> HeldLock | None:
    """Takes the lock, waiting at most ``timeout_s``; None if another holder keeps it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return _waited(path, fd, fcntl.LOCK_EX, timeout_s)


def share(path: Path, *, timeout_s: float = 0.0) -> HeldLock | None:
    """Keeps everybody from taking the lock alone; None if somebody has it. Others may share it. Never creates the
    file."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    return _waited(path, fd, fcntl.LOCK_SH, timeout_s)


def adopt(path: Path, fd: int) -> HeldLock:
    """Takes over a lock whose descriptor the parent handed on. ValueError if ``fd`` is not a lock on ``path``."""
    try:
        same = os.path.samestat(os.fstat(fd), path.stat())
        held = same and _try(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is not open on {path}: {error}") from error
    if not held:
        raise ValueError(f"descriptor {fd} holds no lock on {path}")
    os.set_inheritable(fd, False)
    return HeldLock(path, fd)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock. Never creates the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        return not _try(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextmanager
def holding(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Holds the lock for a short critical section. TimeoutError if it cannot be had in time."""
    lock = take(path, timeout_s=timeout_s)
    if lock is None:
        raise TimeoutError(f"{path} has been locked by another process for more than {timeout_s:g} s")
    try:
        yield
    finally:
        lock.release()


def _waited(path: Path, fd: int, kind: int, timeout_s: float) -> HeldLock | None:
    deadline = time.monotonic() + timeout_s
    while not _try(fd, kind):
        if time.monotonic() >= deadline:
            os.close(fd)
            return None
        time.sleep(_POLL_S)
    return HeldLock(path, fd)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""The folder that an export makes: whole or not there, its owner's alone, never in the place of something else.

Invariant: everything is written and checked under a temporary name beside the target, which appears with one rename.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from hermes_rl_mcp.files import make_private_dir

RECORD = "export.json"
CARD = "README.md"
_SPARE_BYTES = 32 * 2**20
"""For tokenizer, configuration and card."""


def require_free(target: Path, *, force: bool) -> None:
    """Raises InvalidValueError if something is there that may not be replaced: ``force`` replaces an export only."""
    if not os.path.lexists(target):
        return
    ours = target.is_dir() and not target.is_symlink() and ((target / RECORD).is_file() or not any(target.iterdir()))
    if not force or not ours:
        raise InvalidValueError(
            f"{target} exists already{'' if ours else ', and it is no earlier export'}.",
            hint="Give another folder with --output"
            + (", or add --force to replace this one." if ours else "; --force replaces an earlier export only."),
        )


def require_space(target: Path, needed_bytes: int) -> None:
    """Raises PreflightError if the disk has less room."""
    place = next(folder for folder in target.parents if folder.is_dir())
    free, needed = shutil.disk_usage(place).free, needed_bytes + _SPARE_BYTES
    if free < needed:
        raise PreflightError(
            f"The export needs {needed / 2**30:.2f} GiB of disk space in {place}, found {free / 2**30:.2f} GiB.",
            hint="Free some space, or give a folder on another disk with --output.",
        )


@contextmanager
def written_aside(target: Path, *, force: bool) -> Iterator[Path]:
    """A new folder; it takes the target's place when the block ends, and is gone if that fails or a signal comes."""
    try:
        make_private_dir(target.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise PreflightError(
            f"No folder can be made in {target.parent}: {error.strerror}.",
            hint="Give a folder in a place that you may write to, with --output.",
        ) from error
    with _removed_by_signals(temporary):
        try:
            yield temporary
            _settle(temporary)
            require_free(target, force=force)
            if target.is_dir():
                _replace(temporary, target)
            else:
                os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise PreflightError(
                f"The disk was full before {target} was written; nothing of it is left.",
                hint="Free some space, or give a folder on another disk with --output.",
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _replace(new: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent)) / target.name
    os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old.parent, ignore_errors=True)


def _settle(folder: Path) -> None:
    """On the disk, and its owner's alone: libraries write with modes of their own."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o700 if path.is_dir() else 0o600)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _removed_by_signals(folder: Path) -> Iterator[None]:
    """Ends on the spot: some of the libraries' code swallows an exception that a signal handler raises."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Small files that are replaced as a whole, and the wall clock of records.

Invariant: a reader, also one after a power failure, finds the old text or the new one, never a part.
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path


def now() -> str:
    """Wall clock for records, ISO 8601 in UTC. Durations come from ``time.monotonic``."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` (0600). After a failure it is as it was and nothing is left beside it."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

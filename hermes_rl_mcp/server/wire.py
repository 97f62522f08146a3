"""The two ends of a stdio client, out of reach of everything but the protocol.

From ``take`` on descriptor 0 reads as empty and descriptor 1 is stderr, for this process, its libraries and its
children alike: whatever prints, prints to stderr. What was sent there before is not undone, so it is called first.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio import AsyncFile


@dataclass(frozen=True)
class Wire:
    """Descriptors that no child inherits."""

    reading: int
    writing: int


def take() -> Wire:
    """Raises OSError if the process was started without stdin or stdout."""
    sys.stdout.flush()
    wire = Wire(os.dup(0), os.dup(1))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return wire


def opened(
    wire: Wire, at_end: Callable[[], None], taken: Callable[[str], Awaitable[bool]]
) -> tuple[AsyncFile[str], AsyncFile[str]]:
    """Lines of the client, and where lines to it go. ``at_end`` is called when the client has closed its end, ``taken``
    with each line: whether it is dealt with already."""
    import anyio

    class Lines(anyio.AsyncFile[str]):
        async def __aiter__(self) -> AsyncIterator[str]:
            async for line in super().__aiter__():
                if not await taken(line):
                    yield line
            at_end()

    reading = TextIOWrapper(os.fdopen(wire.reading, "rb"), encoding="utf-8", errors="replace")
    writing = TextIOWrapper(os.fdopen(wire.writing, "wb"), encoding="utf-8", newline="\n")
    return Lines(reading), anyio.wrap_file(writing)

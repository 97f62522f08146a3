"""Waiting for a change of the state instead of asking again and again.

Invariant: whoever looks, finds nothing and waits, is woken by every change after the look; nothing is missed between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


class News:
    """``tell`` wakes all who wait. One event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._closed = False

    def tell(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    def close(self) -> None:
        """Nobody waits from now on."""
        self._closed = True
        self.tell()

    async def until(self, look: Callable[[], Found | None], wait_s: float, gone: asyncio.Future[None]) -> Found | None:
        """What ``look`` finds, at once or within ``wait_s``; None when there was nothing or ``gone`` is done."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while not gone.done():
            event = self._event
            found = look()
            left_s = deadline - asyncio.get_running_loop().time()
            if found is not None or left_s <= 0 or self._closed:
                return found
            told = asyncio.ensure_future(event.wait())
            watched: set[asyncio.Future[Any]] = {told, gone}
            await asyncio.wait(watched, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
        return None

"""Writing JSON that is made of stored bytes, and knowing whether it was written.

Invariant: ``on_end(True)`` is called only if every byte was handed to a connection whose client was still there when
the last piece went out; in every other case, also on cancellation, ``on_end(False)`` is. Exactly one of the two.

The server's ``send`` does not fail when the client is gone; it drops. So a second task listens for the disconnect, and
the last piece, without which no client can take the answer for complete, is held back until the loop has looked at
the connection once more.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

GZIP_LEVEL = 1
"""Logprobs are noise to gzip: level 9 takes ten times as long for a few percent."""
GZIP_MINIMUM_BYTES = 1000
PIECE_BYTES = 64 * 1024
"""As much as the connection buffers before it waits for the client."""
LAST_PIECE_BYTES = 1024
LOOKS = 5
"""Turns of the event loop from a closed connection to the task that waits for it: read, close, notice, wake, spare."""

OnEnd = Callable[[bool], None]


class StoredJSON:
    """Response of byte strings that together are one JSON document."""

    def __init__(
        self, parts: Sequence[bytes], executor: Executor, *, stall_s: float, on_end: OnEnd = lambda _: None
    ) -> None:
        self._parts = parts
        self._executor = executor
        self._stall_s = stall_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False
        gone = asyncio.create_task(until_gone(receive))
        try:
            complete = await self._write(scope, send, gone)
        finally:
            gone.cancel()
            self._on_end(complete)

    async def _write(self, scope: Scope, send: Send, gone: asyncio.Task[None]) -> bool:
        parts, headers = self._parts, [(b"content-type", b"application/json"), (b"vary", b"accept-encoding")]
        if sum(map(len, parts)) >= GZIP_MINIMUM_BYTES and accepts_gzip(Headers(scope=scope)):
            parts = await asyncio.get_running_loop().run_in_executor(self._executor, compress, parts)
            headers.append((b"content-encoding", b"gzip"))
        total = sum(map(len, parts))
        headers.append((b"content-length", b"%d" % total))
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            sent = 0
            for piece in _pieces(parts):
                sent += len(piece)
                for _ in range(LOOKS if sent == total else 1):
                    await asyncio.sleep(0)  # also lets others be served between the pieces of a large batch
                if gone.done():
                    return False
                async with asyncio.timeout(self._stall_s):
                    await send(_body(piece, more=sent < total))
        except TimeoutError:
            log.warning("A client read nothing for %g s; the connection is closed", self._stall_s)
            return False
        return True


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(piece: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": more}


def _pieces(parts: Sequence[bytes]) -> Iterator[bytes]:
    """The parts in pieces of about PIECE_BYTES; the last one is short and holds the end of the document."""
    held = bytearray()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), PIECE_BYTES):
            held += view[start : start + PIECE_BYTES]
            if len(held) >= PIECE_BYTES + LAST_PIECE_BYTES:
                yield bytes(held[:-LAST_PIECE_BYTES])
                del held[:-LAST_PIECE_BYTES]
    last = min(LAST_PIECE_BYTES, (len(held) + 1) // 2)
    if len(held) > last:
        yield bytes(held[:-last])
    yield bytes(held[-last:])


def compress(parts: Sequence[bytes]) -> list[bytes]:
    """One gzip member. zlib lets other threads run meanwhile."""
    member = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    compressed = [piece for part in parts if (piece := member.compress(part))]
    return [*compressed, member.flush()]


def accepts_gzip(headers: Headers) -> bool:
    for entry in headers.get("accept-encoding", "").lower().split(","):
        coding, _, quality = entry.partition(";")
        if coding.strip() in ("gzip", "*") and quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000"):
            return True
    return False

"""Reading request bodies: bounded before and after inflating, whatever the client says about them.

Invariant: at no moment is more than ``limit`` bytes of one request, plain or inflated, in memory.
"""

from __future__ import annotations

import zlib

from starlette.requests import Request

from hermes_rl_mcp.errors import HermesRLError

GZIP = zlib.MAX_WBITS | 16
MAX_MEMBERS = 1024
"""Of one gzip body. Each costs a copy of the rest, so very many tiny ones would keep a core busy for minutes."""


class BodyTooLargeError(HermesRLError):
    """More bytes than one request may have."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes.", hint="Send fewer groups per request.")
        self.limit = limit

    def __reduce__(self) -> tuple[type[BodyTooLargeError], tuple[int]]:
        return type(self), (self.limit,)


class BadGzipError(HermesRLError):
    """The body says it is gzip and is not, or ends too early."""

    def __init__(self) -> None:
        super().__init__("Invalid gzip payload")


async def read_body(request: Request, limit: int) -> bytes:
    """The body as sent. Raises BodyTooLargeError before reading what is declared too large."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLargeError(limit)
    chunks: list[bytes] = []
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limit:
            raise BodyTooLargeError(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def is_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("content-encoding", "").lower()


def inflate(body: bytes, limit: int) -> bytes:
    """All members of a gzip body. An empty body stays empty."""
    parts: list[bytes] = []
    room = limit
    while body:
        if len(parts) == MAX_MEMBERS:
            raise BadGzipError
        member = zlib.decompressobj(GZIP)
        try:
            part = member.decompress(body, room + 1)
        except zlib.error:
            raise BadGzipError from None
        if len(part) > room:
            raise BodyTooLargeError(limit)
        if not member.eof:
            raise BadGzipError
        parts.append(part)
        room -= len(part)
        body = member.unused_data
    return b"".join(parts)

"""A forward proxy on loopback that a browser is sent through: it connects to public addresses and to nothing else.

Invariant: the connection goes to the very address that was looked at, for every request of every kind: redirects and
web sockets, which Playwright does not show, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from hermes_rl_mcp.agent.tools.fetching import FetchError, checked_url

Judge = Callable[[str], list[str]]
"""URL of a host to its addresses; raises FetchError where it may not be opened."""
_HEAD_BYTES = 65_536
_CONNECT_S = 20.0
_CHUNK = 65_536


def public_only(url: str) -> list[str]:
    return checked_url(url, allow_private=False)


class GuardProxy:
    """Belongs to the event loop that starts it."""

    def __init__(self, judge: Judge = public_only) -> None:
        self._judge = judge
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Its address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(head, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side went away, or the browser sent what is no request
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = [*line.decode("latin-1").split(" "), "", ""][:3]
        url = f"https://{target}" if method == "CONNECT" else target
        try:
            addresses = await asyncio.to_thread(self._judge, url)
            to_reader, to_writer = await self._connected(url, addresses)
        except FetchError as error:
            text = str(error).encode()
            writer.write(b"HTTP/1.1 403 Forbidden\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n")
            writer.write(b"content-length: %d\r\n\r\n%b" % (len(text), text))
            await writer.drain()
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                to_writer.write(_as_origin(method, url, rest))
            await _both_ways(reader, writer, to_reader, to_writer)
        finally:
            to_writer.close()

    async def _connected(self, url: str, addresses: list[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises FetchError."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for address in addresses:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, port)
        raise FetchError(f"{parts.hostname} did not answer.")


def _as_origin(method: str, url: str, rest: bytes) -> bytes:
    """The request as the page's own server wants it, and the last one of its connection: the next may be for
    another."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [one for one in rest.split(b"\r\n") if one and not one.lower().startswith((b"proxy-", b"connection:"))]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *lines, b"connection: close", b"", b""])


async def _both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    to_reader: asyncio.StreamReader,
    to_writer: asyncio.StreamWriter,
) -> None:
    """Until the far side has said everything."""
    there = asyncio.create_task(_pump(reader, to_writer))
    try:
        await _pump(to_reader, writer)
    finally:
        there.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await there


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()

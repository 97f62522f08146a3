"""A listener that was bound before its server took it over serves as well as one that the server made."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hermes_rl_mcp.loopback import bound_socket


@pytest.mark.anyio
async def test_answers_in_several_parts_do_not_wait_for_each_other() -> None:
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_socket = writer.get_extra_info("socket")
        found.set_result(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bound_socket("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await asyncio.wait_for(found, 30) == 1
        writer.close()
        await writer.wait_closed()

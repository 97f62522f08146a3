"""What clients and checkers of the protocol expect of any server, whatever it is for."""

from __future__ import annotations

import re
from typing import Any

import mcp.types as t
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.server.app import HermesServer, build_server

URI = re.compile(r"[a-z]+:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII)
"""RFC 3986 has no blanks and no angle brackets."""


def server_in(environ: dict[str, str]) -> HermesServer:
    return build_server(Operations.from_environ(environ, Flags()))


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:The logging capability is deprecated:mcp.MCPDeprecationWarning")
async def test_a_client_of_before_may_ask_for_a_log_level_and_is_told_that_it_may(environ: dict[str, str]) -> None:
    async with Client(server_in(environ), mode="legacy") as client:
        assert client.server_capabilities.logging is not None
        assert isinstance(await client.set_logging_level("info"), t.EmptyResult)


@pytest.mark.anyio
async def test_every_icon_is_at_an_address_that_clients_can_read(environ: dict[str, str]) -> None:
    async with Client(server_in(environ)) as client:
        offered: list[Any] = [*(await client.list_tools()).tools, *(await client.list_prompts()).prompts]
    icons = [icon for one in offered for icon in one.icons or []]
    assert len(icons) >= 10
    assert all(URI.fullmatch(icon.src) for icon in icons), [icon.src for icon in icons if not URI.fullmatch(icon.src)]


@pytest.mark.anyio
async def test_what_a_client_must_be_able_to_do_is_said_by_an_error_of_the_protocol(environ: dict[str, str]) -> None:
    server = server_in(environ)

    @server.tool()
    async def needs_sampling() -> str:
        raise MCPError(code=t.MISSING_REQUIRED_CLIENT_CAPABILITY, message="no sampling", data={})

    async with Client(server) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("needs_sampling", {})
    assert caught.value.code == t.MISSING_REQUIRED_CLIENT_CAPABILITY

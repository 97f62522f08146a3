"""The SDK's client of before, 1.x: a handshake, and sessions over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import mcp.types as t
from mcp import ClientSession, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import AnyUrl
from wire import Answer, OnProgress, Target, content_of, every_page, said_in

_TIMEOUT_S = 90


def _json(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    return dumped


class Mcp1:
    def __init__(self, session: ClientSession, revision: str, changed: list[str]) -> None:
        self._session = session
        self._changed = changed
        self.revision = revision

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self._session.list_tools()).tools]

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress | None = None) -> Answer:
        return Answer.of(_json(await self._session.call_tool(tool, arguments, progress_callback=on_progress)))

    async def resources(self) -> list[str]:
        async def page(cursor: str | None) -> tuple[list[str], str | None]:
            listed = await self._session.list_resources(cursor)
            return [str(resource.uri) for resource in listed.resources], listed.nextCursor

        return await every_page(page)

    async def templates(self) -> list[str]:
        return [found.uriTemplate for found in (await self._session.list_resource_templates()).resourceTemplates]

    async def read(self, uri: str) -> str | bytes:
        return content_of(_json(await self._session.read_resource(AnyUrl(uri)))["contents"])

    async def prompts(self) -> dict[str, list[str]]:
        listed = (await self._session.list_prompts()).prompts
        return {prompt.name: [a.name for a in prompt.arguments or [] if a.required] for prompt in listed}

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        return said_in(_json(await self._session.get_prompt(name, arguments))["messages"])

    async def complete(self, template: str, argument: str, value: str) -> list[str]:
        reference = t.ResourceTemplateReference(type="ref/resource", uri=template)
        answer = await self._session.complete(reference, {"name": argument, "value": value})
        return answer.completion.values

    @asynccontextmanager
    async def watch(self, uri: str) -> AsyncIterator[list[str]]:
        self._changed.clear()
        await self._session.subscribe_resource(AnyUrl(uri))
        yield self._changed
        await self._session.unsubscribe_resource(AnyUrl(uri))


@asynccontextmanager
async def connect(target: Target, era: str) -> AsyncIterator[Mcp1]:
    assert era == "legacy", "this client knows no other"
    changed: list[str] = []

    async def heard(message: Any) -> None:
        if isinstance(message, t.ServerNotification) and isinstance(message.root, t.ResourceUpdatedNotification):
            changed.append(str(message.root.params.uri))

    async with AsyncExitStack() as stack:
        if target.transport == "stdio":
            server = StdioServerParameters(command=target.command, args=target.args, env=target.env)
            streams = await stack.enter_async_context(stdio_client(server))
        elif target.transport == "sse":
            streams = await stack.enter_async_context(sse_client(target.url, target.headers))
        else:
            web = await stack.enter_async_context(httpx.AsyncClient(headers=target.headers, timeout=_TIMEOUT_S))
            opened = await stack.enter_async_context(streamable_http_client(target.url, http_client=web))
            streams = opened[0], opened[1]
        timeout = timedelta(seconds=_TIMEOUT_S)
        session = await stack.enter_async_context(ClientSession(*streams, timeout, message_handler=heard))
        greeting = await session.initialize()
        yield Mcp1(session, str(greeting.protocolVersion), changed)

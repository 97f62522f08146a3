"""The SDK's client, 2.x, in either era of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx2
import mcp.types as t
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from wire import ERA, Answer, OnProgress, Target, content_of, every_page, said_in

MODES = {"legacy": "legacy", "modern": ERA["modern"]}
_TIMEOUT_S = 90


def _json(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    return dumped


class Mcp2:
    def __init__(self, client: Client, changed: list[str]) -> None:
        self._client = client
        self._changed = changed
        self.revision = client.protocol_version

    async def tools(self) -> list[str]:
        return [tool.name for tool in (await self._client.list_tools()).tools]

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress | None = None) -> Answer:
        return Answer.of(_json(await self._client.call_tool(tool, arguments, progress_callback=on_progress)))

    async def resources(self) -> list[str]:
        async def page(cursor: str | None) -> tuple[list[str], str | None]:
            listed = await self._client.list_resources(cursor=cursor)
            return [str(resource.uri) for resource in listed.resources], listed.next_cursor

        return await every_page(page)

    async def templates(self) -> list[str]:
        return [found.uri_template for found in (await self._client.list_resource_templates()).resource_templates]

    async def read(self, uri: str) -> str | bytes:
        return content_of(_json(await self._client.read_resource(uri))["contents"])

    async def prompts(self) -> dict[str, list[str]]:
        listed = (await self._client.list_prompts()).prompts
        return {prompt.name: [a.name for a in prompt.arguments or [] if a.required] for prompt in listed}

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        return said_in(_json(await self._client.get_prompt(name, arguments))["messages"])

    async def complete(self, template: str, argument: str, value: str) -> list[str]:
        reference = t.ResourceTemplateReference(type="ref/resource", uri=template)
        answer = await self._client.complete(reference, {"name": argument, "value": value})
        return answer.completion.values

    @asynccontextmanager
    async def watch(self, uri: str) -> AsyncIterator[list[str]]:
        self._changed.clear()
        if self.revision != ERA["modern"]:
            await self._client.subscribe_resource(uri)
            yield self._changed
            await self._client.unsubscribe_resource(uri)
            return

        async def follow() -> None:
            async for event in stream:
                self._changed.append(str(getattr(event, "uri", event)))

        async with self._client.listen(resource_subscriptions=[uri]) as stream, anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            yield self._changed
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def connect(target: Target, era: str) -> AsyncIterator[Mcp2]:
    changed: list[str] = []

    async def heard(message: Any) -> None:
        if isinstance(message, t.ResourceUpdatedNotification):
            changed.append(str(message.params.uri))

    async with AsyncExitStack() as stack:
        server: Any
        if target.transport == "stdio":
            server = StdioServerParameters(command=target.command, args=target.args, env=target.env)
        elif target.transport == "sse":
            server = sse_client(target.url, target.headers)
        else:
            web = await stack.enter_async_context(httpx2.AsyncClient(headers=target.headers, timeout=_TIMEOUT_S))
            server = streamable_http_client(target.url, http_client=web)
        client = Client(server, mode=MODES[era], read_timeout_seconds=_TIMEOUT_S, message_handler=heard)
        yield Mcp2(await stack.enter_async_context(client), changed)

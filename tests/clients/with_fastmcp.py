"""FastMCP's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import mcp.types as t
from fastmcp import Client
from fastmcp.client.transports import SSETransport, StdioTransport, StreamableHttpTransport
from mcp.client.subscriptions import listen
from wire import ERA, Answer, OnProgress, Target, content_of, said_in

_TIMEOUT_S = 90


def _json(model: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    return dumped


class FastMcp:
    def __init__(self, client: Client[Any], revision: str, changed: list[str]) -> None:
        self._client = client
        self._changed = changed
        self.revision = revision

    async def tools(self) -> list[str]:
        return [tool.name for tool in await self._client.list_tools()]

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress | None = None) -> Answer:
        return Answer.of(_json(await self._client.call_tool_mcp(tool, arguments, progress_handler=on_progress)))

    async def resources(self) -> list[str]:
        return [str(resource.uri) for resource in await self._client.list_resources()]

    async def templates(self) -> list[str]:
        return [_json(found)["uriTemplate"] for found in await self._client.list_resource_templates()]

    async def read(self, uri: str) -> str | bytes:
        return content_of([_json(content) for content in await self._client.read_resource(uri)])

    async def prompts(self) -> dict[str, list[str]]:
        listed = await self._client.list_prompts()
        return {prompt.name: [a.name for a in prompt.arguments or [] if a.required] for prompt in listed}

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        return said_in(_json(await self._client.get_prompt(name, arguments))["messages"])

    async def complete(self, template: str, argument: str, value: str) -> list[str]:
        reference = t.ResourceTemplateReference(type="ref/resource", uri=template)
        answer = await self._client.complete(reference, {"name": argument, "value": value})
        return list(answer.values)

    @asynccontextmanager
    async def watch(self, uri: str) -> AsyncIterator[list[str]]:
        self._changed.clear()
        if self.revision != ERA["modern"]:
            await self._client.session.subscribe_resource(uri)
            yield self._changed
            await self._client.session.unsubscribe_resource(uri)
            return

        async def follow() -> None:
            async for event in stream:
                self._changed.append(str(getattr(event, "uri", event)))

        # FastMCP has no call for it, so this is the SDK's on its session.
        listening = listen(self._client.session, resource_subscriptions=[uri])
        async with listening as stream, anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            yield self._changed
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def connect(target: Target, era: str) -> AsyncIterator[FastMcp]:
    changed: list[str] = []

    async def heard(message: Any) -> None:
        note = getattr(message, "root", message)
        if isinstance(note, t.ResourceUpdatedNotification):
            changed.append(str(note.params.uri))

    transport: Any
    if target.transport == "stdio":
        transport = StdioTransport(target.command, target.args, target.env, keep_alive=False)
    elif target.transport == "sse":
        transport = SSETransport(target.url, target.headers)
    else:
        transport = StreamableHttpTransport(target.url, target.headers)
    mode = {"legacy": "legacy", "modern": "auto"}[era]  # auto is what it does when nobody asks
    async with Client(transport, mode=mode, timeout=_TIMEOUT_S, message_handler=heard) as client:
        yield FastMcp(client, client.protocol_version or "", changed)

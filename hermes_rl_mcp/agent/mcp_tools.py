"""Any MCP server as a toolset: started over stdio or reached over HTTP, its tools called like ours.

Invariant: the connection lives in a thread of its own, so every rollout of every loop may use it; ``close`` ends the
server that was started.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.loop_thread import LoopThread
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

_CLOSE_S = 15.0
_NAME = re.compile(r"[^A-Za-z0-9_-]+")


class McpServer(BaseModel):
    """How a server is reached: ``command`` (stdio) or ``url`` (streamable HTTP)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$")
    """Of the toolset."""
    command: str | None = None
    """Program that speaks MCP over stdio."""
    args: list[str] = []
    """Its arguments. Keys do not belong here: other users of the machine can read them."""
    env: dict[str, str] = {}
    """Its environment beyond the few variables that every program needs."""
    cwd: str | None = None
    """Folder it runs in."""
    url: str | None = None
    """Address of a server over streamable HTTP."""
    headers: dict[str, str] = {}
    """Sent with every request, such as authorization."""
    prefix: str = ""
    """Before each tool's name, where names of several servers would meet."""
    tools: list[str] | None = None
    """Only these of its tools. Null = all."""
    start_timeout_s: float = Field(60.0, gt=0)
    """Seconds until it has to have listed its tools."""
    call_timeout_s: float = Field(120.0, gt=0)
    """Seconds that one call may take."""

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"MCP server {self.name!r} needs either a command or a url")
        return self


class McpToolset:
    """A connected server. Use ``with``, or call ``close``; its methods block."""

    def __init__(self, server: McpServer) -> None:
        import mcp  # noqa: F401 - here, so that the server's time does not run meanwhile

        self.server = server
        self._thread = LoopThread(f"mcp-{server.name}")
        self._client: Any = None
        self._done = asyncio.Event()  # set in the thread's loop alone
        ready = self._thread.run(_future(), 5.0)
        self._life = self._thread.start(self._live(ready))
        try:
            listed = self._thread.run(_awaited(ready), server.start_timeout_s)
            self.tools = self._made(listed)
        except (EndpointError, InvalidValueError):
            self.close()
            raise
        except TimeoutError:
            self.close()
            raise EndpointError(
                f"The MCP server {server.name!r} did not list its tools within {server.start_timeout_s:g} s.",
                hint="Try its command or address by hand.",
            ) from None

    def __enter__(self) -> McpToolset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and the server if it was started here. Closing twice is fine."""
        if self._life.done():
            self._thread.close()
            return
        try:
            self._thread.run(self._finished(), _CLOSE_S)
        except (TimeoutError, EndpointError):
            self._life.cancel()
        self._thread.close()

    async def _finished(self) -> None:
        self._done.set()
        await asyncio.wrap_future(self._life)

    async def _live(self, ready: asyncio.Future[list[Any]]) -> None:
        """Connects, lists, and stays until the end: a client must be left in the task that entered it."""
        try:
            async with AsyncExitStack() as stack:
                client = self._client = await self._connected(stack)
                if not ready.done():
                    ready.set_result(await _listed(client))
                await self._done.wait()
        except Exception as error:  # noqa: BLE001 - whatever a stranger's program does; told to whoever waits
            if not ready.done():
                ready.set_exception(
                    EndpointError(
                        f"The MCP server {self.server.name!r} cannot be used: {_inner(error)}",
                        hint="Try its command or address by hand.",
                    )
                )
        finally:
            self._client = None

    async def _connected(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters  # the SDK's client takes 200 ms

        if self.server.command is not None:
            started = StdioServerParameters(
                command=self.server.command, args=self.server.args, env=self.server.env, cwd=self.server.cwd
            )
            return await stack.enter_async_context(Client(started))
        import httpx2  # the SDK's own; what it is called with has to be of it
        from mcp.client.streamable_http import streamable_http_client

        patience = httpx2.Timeout(30.0, read=self.server.call_timeout_s)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self.server.headers, timeout=patience))
        return await stack.enter_async_context(Client(streamable_http_client(str(self.server.url), http_client=http)))

    def _made(self, listed: list[Any]) -> list[Tool]:
        wanted = self.server.tools
        if wanted is not None and (away := set(wanted) - {tool.name for tool in listed}):
            raise InvalidValueError(
                f"The MCP server {self.server.name!r} has no tool {', '.join(sorted(away))}.",
                hint=f"It has: {', '.join(tool.name for tool in listed)}.",
            )
        return [
            Tool(
                _NAME.sub("_", f"{self.server.prefix}{tool.name}"),
                self.server.name,
                (tool.description or tool.title or tool.name).strip(),
                dict(tool.input_schema),
                self._handler(tool.name),
            )
            for tool in listed
            if wanted is None or tool.name in wanted
        ]

    def _handler(self, name: str) -> Callable[[CallContext, dict[str, Any]], JsonValue]:
        def handler(context: CallContext, args: dict[str, Any]) -> JsonValue:
            try:
                return self._thread.run(self._call(name, args), self.server.call_timeout_s)
            except TimeoutError:
                return {"error": f"{name} gave no answer within {self.server.call_timeout_s:g} s."}

        return handler

    async def _call(self, name: str, args: dict[str, Any]) -> JsonValue:
        from mcp import MCPError

        if self._client is None:
            return {"error": f"The MCP server {self.server.name!r} has ended."}
        try:
            result = await self._client.call_tool(name, args)
        except MCPError as error:
            return {"error": str(error)}
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        answer: JsonValue = result.structured_content if result.structured_content is not None else "\n".join(texts)
        if result.is_error:
            return {"error": "\n".join(texts) or "The tool failed."}
        return answer if isinstance(answer, dict) else {"result": answer}


def mcp_tools(toolsets: list[McpToolset]) -> list[Tool]:
    """All tools of several servers. Raises InvalidValueError where two have the same name."""
    found: dict[str, Tool] = {}
    for toolset in toolsets:
        for tool in toolset.tools:
            if other := found.get(tool.name):
                raise InvalidValueError(
                    f"The MCP servers {other.toolset!r} and {tool.toolset!r} both have a tool {tool.name!r}.",
                    hint="Set a prefix for one of them.",
                )
            found[tool.name] = tool
    return list(found.values())


def mcp_servers(settings: Mapping[str, Any]) -> list[McpServer]:
    """Servers in the form of clients' files: ``{"name": {"command": ..., "args": ..., "env": ...} or {"url": ...}}``.
    Raises InvalidValueError."""
    try:
        return [McpServer.model_validate({"name": name, **entry}) for name, entry in settings.items()]
    except (ValueError, TypeError) as error:
        raise InvalidValueError(f"MCP servers: {error}", hint="Each needs a command or a url.") from None


async def _future() -> asyncio.Future[list[Any]]:
    return asyncio.get_running_loop().create_future()


async def _awaited(future: asyncio.Future[list[Any]]) -> list[Any]:
    return await asyncio.shield(future)


async def _listed(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found


def _inner(error: BaseException) -> str:
    """The one that began it; task groups wrap."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]

"""Any MCP server as a toolset: started over stdio or reached over HTTP, its tools called like ours.

Invariant: a connection lives in a thread of its own, so every rollout of every loop may use it; ``close`` ends the
server that was started. A server that dies is started, or reached, again at the next call; no call is repeated.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.loop_thread import LoopThread
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

_CLOSE_S = 15.0
_RETRY_S = 30.0
"""After a server could not be started or reached again: so long nobody tries."""
_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_PASSED_ON = ("HERMES_RL_RUN_ID", "HERMES_RL_TEST_MARK")
"""With them a run, or a test, finds what is left of a server that does not end by itself."""


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
    """A connected server. Use ``with``, or call ``close``; its methods block. Raises EndpointError where it cannot be
    used, InvalidValueError where it lacks one of the wanted tools."""

    def __init__(self, server: McpServer) -> None:
        import mcp  # noqa: F401 - here, so that the server's time does not run meanwhile

        self.server = server
        self._thread = LoopThread(f"mcp-{server.name}")
        self._lock = threading.Lock()
        self._is_closed = False
        self._failed_at: float | None = None
        self._connection: _Connection | None = None
        try:
            self._connection = _Connection(server, self._thread)
            self.tools = self._made(self._connection.listed)
        except (EndpointError, InvalidValueError):
            self.close()
            raise

    def __enter__(self) -> McpToolset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and the server if it was started here. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        self._thread.close()

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
            connection = self._current()
            try:
                return self._thread.run(connection.call(name, args), self.server.call_timeout_s)
            except TimeoutError:
                return {"error": f"{name} gave no answer within {self.server.call_timeout_s:g} s."}

        return handler

    def _current(self) -> _Connection:
        """The connection, a new one if the last was lost. Raises EndpointError."""
        with self._lock:
            if self._is_closed:
                raise EndpointError(f"The MCP server {self.server.name!r} has ended.", hint="Go on without it.")
            if self._connection is not None and not self._connection.is_lost:
                return self._connection
            if self._failed_at is not None and time.monotonic() - self._failed_at < _RETRY_S:
                raise EndpointError(
                    f"The MCP server {self.server.name!r} cannot be reached.",
                    hint=f"Go on without it; it is tried again after {_RETRY_S:g} s.",
                )
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            try:
                self._connection = _Connection(self.server, self._thread)
            except EndpointError:
                self._failed_at = time.monotonic()
                raise
            return self._connection


class _Connection:
    """A server from its start to its end."""

    def __init__(self, server: McpServer, thread: LoopThread) -> None:
        self.server = server
        self.listed: list[Any]
        """Its tools."""
        self.is_lost = False
        """It ended by itself, or forgot us."""
        self._thread = thread
        self._client: Any = None
        self._done = asyncio.Event()  # used in the thread's loop alone
        ready: Future[list[Any]] = Future()
        self._life = thread.start(self._live(ready))
        try:
            self.listed = ready.result(server.start_timeout_s)
        except TimeoutError:
            self._life.cancel()
            raise EndpointError(
                f"The MCP server {server.name!r} did not list its tools within {server.start_timeout_s:g} s.",
                hint="Try its command or address by hand.",
            ) from None

    def close(self) -> None:
        if self._life.done():
            return
        try:
            self._thread.run(self._finished(), _CLOSE_S)
        except TimeoutError:
            self._life.cancel()

    async def call(self, name: str, args: dict[str, Any]) -> JsonValue:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(name, args)
        except MCPError as error:
            self.is_lost = self.is_lost or error.code == CONNECTION_CLOSED or await self._is_gone()
            return {"error": f"The MCP server {self.server.name!r}: {error}"}
        texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
        if result.is_error:
            return {"error": "\n".join(texts) or "The tool failed."}
        answer: JsonValue = result.structured_content if result.structured_content is not None else "\n".join(texts)
        return answer if isinstance(answer, dict) else {"result": answer}

    async def _is_gone(self) -> bool:
        """Asks for its tools: a server over HTTP that was started again does not know this session."""
        from mcp import MCPError

        try:
            await self._client.list_tools()
        except MCPError:
            return True
        return False

    async def _finished(self) -> None:
        self._done.set()
        await asyncio.wrap_future(self._life)

    async def _live(self, ready: Future[list[Any]]) -> None:
        """Connects, lists, and stays until the end: a client must be left in the task that entered it."""
        try:
            async with AsyncExitStack() as stack:
                self._client = await self._connected(stack)
                ready.set_result(await _listed(self._client))
                await self._done.wait()
        except Exception as error:  # noqa: BLE001 - whatever a stranger's program does; told to whoever waits
            self.is_lost = True
            if not ready.done():
                ready.set_exception(
                    EndpointError(
                        f"The MCP server {self.server.name!r} cannot be used: {_inner(error)}",
                        hint="Try its command or address by hand.",
                    )
                )

    async def _connected(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters  # the SDK's client takes 200 ms

        if self.server.command is not None:
            marks = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
            started = StdioServerParameters(
                command=self.server.command, args=self.server.args, env=marks | self.server.env, cwd=self.server.cwd
            )
            return await stack.enter_async_context(Client(started))
        import httpx2  # the SDK's own; what it is called with has to be of it
        from mcp.client.streamable_http import streamable_http_client

        patience = httpx2.Timeout(30.0, read=self.server.call_timeout_s)
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=self.server.headers, timeout=patience))
        return await stack.enter_async_context(Client(streamable_http_client(str(self.server.url), http_client=http)))


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

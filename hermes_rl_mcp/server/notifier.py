"""Tells clients of both protocol eras that a resource or the list of resources has changed.

All news goes over one bus. Clients of 2026 read it through the streams they opened (``subscriptions/listen``). For
those that shook hands (up to 2025-11-25) it is forwarded to the connection that subscribed, or listed the resources.
What a client asked for is forgotten when its connection or stream ends, and what waits for a slow one is at most one
note per address.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import mcp.types as t
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import NotificationOptions
from mcp.server.mcpserver import MCPServer
from mcp.server.models import InitializationOptions
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
)
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.server.follower import INTERVAL_S, Follower, ListState
from hermes_rl_mcp.server.resources.listing import page
from hermes_rl_mcp.server.resources.serving import SCHEME, Resources
from hermes_rl_mcp.untrusted import shown

log = logging.getLogger(__name__)

MAX_STREAMS = 256
MAX_URIS = 200
"""Of one client."""
MAX_FOLLOWED = 1_000
"""Addresses of all clients together: each costs a look at its files per second."""
MAX_URI_CHARS = 2_000

RequestContext = ServerRequestContext[Any, Any]
Settings = dict[str, dict[str, Any]]


class Notifier:
    """One per server: ``MCPServer(subscriptions=notifier.bus)``, then ``notifier.attach(server)``."""

    def __init__(self, context: Context, resources: Resources, interval_s: float = INTERVAL_S) -> None:
        self.bus = InMemorySubscriptionBus()
        self._resources = resources
        self._follower = Follower(context, resources, self.bus, self._uris, interval_s)
        self._streams = ListenHandler(self.bus, max_subscriptions=MAX_STREAMS)
        self._clients: dict[Connection, _Client] = {}
        self._server: MCPServer[Any] | None = None
        self.bus.subscribe(self._forward)

    def attach(self, server: MCPServer[Any]) -> None:
        """Serves subscriptions of both eras and lists in pages, and says so in the server's capabilities.

        The SDK's high-level server has no public way to do this; its own examples use the low-level one as well.
        """
        self._server = server
        low = server._lowlevel_server
        low.add_request_handler("resources/subscribe", t.SubscribeRequestParams, self._subscribe)
        low.add_request_handler("resources/unsubscribe", t.UnsubscribeRequestParams, self._unsubscribe)
        low.add_request_handler("subscriptions/listen", t.SubscriptionsListenRequestParams, self._listen)
        low.add_request_handler("resources/list", t.PaginatedRequestParams, self._list)
        low.add_request_handler("resources/templates/list", t.PaginatedRequestParams, self._list_templates)
        usual = low.create_initialization_options

        def with_list_changes(
            notification_options: NotificationOptions | None = None,
            experimental_capabilities: Settings | None = None,
            extensions: Settings | None = None,
        ) -> InitializationOptions:
            made = notification_options or NotificationOptions()  # the transports give none
            made.resources_changed = True
            return usual(made, experimental_capabilities, extensions)

        low.create_initialization_options = with_list_changes  # type: ignore[method-assign]

    def close(self) -> None:
        """Ends the streams of 2026 clients in order, before the server leaves."""
        self._streams.close()

    @property
    def idle(self) -> bool:
        """Nobody is told anything, and no file is looked at."""
        return not self._clients and not self._follower.followed and not self._follower.running

    async def _subscribe(self, ctx: RequestContext, params: t.SubscribeRequestParams) -> t.EmptyResult:
        uri = str(params.uri)
        client = self._client(ctx)
        if uri not in client.uris:
            if len(client.uris) >= MAX_URIS or len(uri) > MAX_URI_CHARS or self._follower.followed >= MAX_FOLLOWED:
                raise MCPError(
                    code=t.INVALID_PARAMS, message="Too many subscriptions, or too long an address. Unsubscribe first."
                )
            followed = await self._follow(uri)
            if client.gone or uri in client.uris:  # left, or asked twice, in the meantime
                self._unfollow([uri] if followed else [])
            else:
                client.uris[uri] = followed
        return t.EmptyResult()

    async def _unsubscribe(self, ctx: RequestContext, params: t.UnsubscribeRequestParams) -> t.EmptyResult:
        uri = str(params.uri)
        client = self._clients.get(_connection(ctx))
        if client is not None and client.uris.pop(uri, False):
            self._follower.unfollow(uri)
        return t.EmptyResult()

    async def _listen(
        self, ctx: RequestContext, params: t.SubscriptionsListenRequestParams
    ) -> t.SubscriptionsListenResult:
        wanted = params.notifications
        async with self._following(wanted.resource_subscriptions or [], bool(wanted.resources_list_changed)) as uris:
            honored = wanted.model_copy(update={"resource_subscriptions": uris or None})
            return await self._streams(ctx, params.model_copy(update={"notifications": honored}))

    @asynccontextmanager
    async def _following(self, uris: Iterable[str], lists: bool) -> AsyncIterator[list[str]]:
        """Yields those that can be subscribed to: the acknowledgement names them."""
        honored: list[str] = []
        followed: list[str] = []
        follows_list = False
        try:
            for uri in dict.fromkeys(uris):
                if len(honored) >= MAX_URIS or len(uri) > MAX_URI_CHARS or self._follower.followed >= MAX_FOLLOWED:
                    continue
                try:
                    if await self._follow(uri):
                        followed.append(uri)
                    honored.append(uri)
                except MCPError as error:
                    log.info("not followed: %s", error)
            if lists:
                self._follower.follow_list(await self._follower.list_state())
                follows_list = True
            yield honored
        finally:
            self._unfollow(followed)
            if follows_list:
                self._follower.unfollow_list()

    async def _list(self, ctx: RequestContext, params: t.PaginatedRequestParams) -> t.ListResourcesResult:
        assert self._server is not None
        client = None if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS else self._client(ctx)
        stamp = await self._follower.list_stamp() if client is not None and not client.lists else ()
        found = await self._server.list_resources()
        if client is not None:  # who has seen the list is told when it changes
            self._follow_list(client, ListState.of(stamp, [str(one.uri) for one in found]))
        shown_now, cursor = page(found, params.cursor, lambda one: str(one.uri))
        return t.ListResourcesResult(resources=shown_now, next_cursor=cursor)

    async def _list_templates(
        self, ctx: RequestContext, params: t.PaginatedRequestParams
    ) -> t.ListResourceTemplatesResult:
        assert self._server is not None
        found = await self._server.list_resource_templates()
        shown_now, cursor = page(found, params.cursor, lambda one: one.uri_template)
        return t.ListResourceTemplatesResult(resource_templates=shown_now, next_cursor=cursor)

    async def _uris(self) -> Sequence[str]:
        assert self._server is not None
        return [str(one.uri) for one in await self._server.list_resources()]

    async def _follow(self, uri: str) -> bool:
        """Whether its files are looked at; raises MCPError if it is ours and cannot be meant."""
        try:
            found = self._resources.find(uri)
            if found is None and uri.startswith(SCHEME):
                raise MCPError(code=t.INVALID_PARAMS, message=f"Unknown resource: {shown(uri, 200)}")
            return found is not None and await self._follower.follow(uri, found)
        except HermesRLError as error:
            raise MCPError(code=t.INVALID_PARAMS, message=shown(str(error))) from error

    def _unfollow(self, uris: Iterable[str]) -> None:
        for uri in uris:
            self._follower.unfollow(uri)

    def _follow_list(self, client: _Client, state: ListState) -> None:
        if not client.lists and not client.gone:
            self._follower.follow_list(state)
            client.lists = True

    def _client(self, ctx: RequestContext) -> _Client:
        connection = _connection(ctx)
        if connection not in self._clients:
            self._clients[connection] = _Client(connection)
            connection.exit_stack.callback(self._forget, connection)
        return self._clients[connection]

    def _forget(self, connection: Connection) -> None:
        client = self._clients.pop(connection)
        client.leave()
        self._unfollow(uri for uri, followed in client.uris.items() if followed)
        if client.lists:
            self._follower.unfollow_list()

    def _forward(self, event: ServerEvent) -> None:
        for client in self._clients.values():
            if isinstance(event, ResourceUpdated) and event.uri in client.uris:
                client.tell(event.uri)
            elif isinstance(event, ResourcesListChanged) and client.lists:
                client.tell(None)


class _Client:
    """A connection that shook hands, and what it wants to be told. ``None`` stands for the list of resources."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.uris: dict[str, bool] = {}
        """Subscribed to, and whether the follower looks at its files."""
        self.lists = False
        self.gone = False
        self._waiting: dict[str | None, None] = {}
        self._task: asyncio.Task[None] | None = None

    def tell(self, what: str | None) -> None:
        """Returns at once: a client that does not read keeps nobody else waiting, and its notes do not pile up."""
        self._waiting[what] = None
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="notes", context=contextvars.Context())

    def leave(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    async def _send(self) -> None:
        try:
            while self._waiting:
                what = next(iter(self._waiting))
                del self._waiting[what]
                if what is None:
                    await self._connection.send_resource_list_changed()
                elif what in self.uris:
                    await self._connection.send_resource_updated(what)
        except Exception:  # whatever a transport raises concerns this client alone
            log.exception("a client could not be told of a change")
        finally:
            self._task = None


def _connection(ctx: RequestContext) -> Connection:
    return ctx.session._connection  # no public accessor in mcp 2.3

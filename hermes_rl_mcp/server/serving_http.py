"""One HTTP server for all clients: streamable HTTP at /mcp, SSE at /sse, people at /dashboard, behind one gate."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import uvicorn
from mcp.server.transport_security import TransportSecuritySettings
from starlette.routing import Route

from hermes_rl_mcp import dashboard
from hermes_rl_mcp.loopback import bound_socket, is_loopback
from hermes_rl_mcp.server.gate import Gate, Guarded
from hermes_rl_mcp.server.leaving import SIGNALS, leave

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from hermes_rl_mcp.server.app import HermesServer
    from hermes_rl_mcp.server.flags import Serving

log = logging.getLogger("hermes_rl_mcp.server")

_EVERY_ADDRESS = {"0.0.0.0", "::"}
"""To listen on; no client calls them."""
_SWITCH_S = 0.001
"""Of Python's threads; by default one that reads a run keeps the one that answers waiting five times as long."""
_SHUTDOWN_S = 3
"""Open event streams would keep the server alive for ever."""
_LONGEST_S = 4.5
"""Hundreds of streams take their time to be cut, and whoever ended the server does not wait for long."""


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn's handlers know nothing of SIGHUP, and let the process die of the signal afterwards."""

    def __init__(self, config: uvicorn.Config, close_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._close_streams = close_streams

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._end, number)
        yield

    def _end(self, number: int) -> None:
        self._close_streams()
        log.info("leaving (%s); runs go on", signal.Signals(number).name)
        self.force_exit = self.should_exit  # whoever asks twice is not kept waiting
        self.handle_exit(number, None)  # which tells event streams, too
        asyncio.get_running_loop().call_later(_LONGEST_S, leave, "some streams did not end")


def serve(server: HermesServer, serving: Serving) -> None:
    """Until a signal comes; open streams are cut after a few seconds. Raises PreflightError if the address is taken."""
    listener = bound_socket(serving.host, serving.port)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        application(server, serving),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    shown = f"[{serving.host}]" if ":" in serving.host else serving.host
    log.info("serving on http://%s:%d/mcp (streamable HTTP), /sse (SSE) and /dashboard (people)", shown, port)
    if not is_loopback(serving.host):
        log.warning("what travels is not encrypted: beyond a network of your own, put a proxy with TLS in front")
    sys.setswitchinterval(_SWITCH_S)
    anyio.run(_Server(config, server.notifier.close).serve, [listener])


def application(server: HermesServer, serving: Serving) -> Guarded:
    """All routes behind the gate. The SDK's own check of Host and Origin is off: it covers its own routes only."""
    off = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(host=serving.host, transport_security=off)
    for route in server.sse_app(host=serving.host, transport_security=off).routes:
        if isinstance(route, Route):
            route.app = _once(route.app)
        app.router.routes.append(route)
    app.router.routes.extend(dashboard.routes(server.operations.context, token=serving.token))
    gate = Gate(
        token=serving.token,
        hosts={name.lower() for name in (serving.host, *serving.accept_hosts)} - _EVERY_ADDRESS,
        origins={origin.lower().rstrip("/") for origin in serving.accept_origins},
        own_token_check=(dashboard.BASE,),
    )
    return Guarded(app, gate)


def _once(app: ASGIApp) -> ASGIApp:
    """Only the first response goes out. The SDK gives a second one when the server ends an event stream."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        starts = 0

        async def pass_on(message: Message) -> None:
            nonlocal starts
            starts += message["type"] == "http.response.start"
            if starts < 2:
                await send(message)

        await app(scope, receive, pass_on)

    return answer

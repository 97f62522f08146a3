"""``hermes-rl dashboard``: pages for people, on this machine, until Ctrl-C.

Invariant: only loopback is listened on, and nothing is shown to anybody who does not bring the token of this start.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Route

from hermes_rl_mcp.dashboard import BASE, routes
from hermes_rl_mcp.loopback import bound_socket
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.server.gate import Gate, Guarded

_HOST = "127.0.0.1"
_SHUTDOWN_S = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Server(uvicorn.Server):
    """Ends with code 0 on Ctrl-C, which is how this program is meant to be ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def run(context: Context, port: int) -> None:
    """Until a signal comes. Raises PreflightError if the port is taken."""
    token = secrets.token_urlsafe(24)
    listener = bound_socket(_HOST, port)
    listener.listen()  # whoever opens the address at once waits a moment, and is not refused
    config = uvicorn.Config(
        application(context, token),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    sys.stdout.write(_welcome(context, listener.getsockname()[1], token))
    sys.stdout.flush()
    anyio.run(_Server(config).serve, [listener])


def application(context: Context, token: str) -> Guarded:
    """The pages by themselves, for this machine alone."""

    async def start(request: Request) -> RedirectResponse:
        return RedirectResponse(BASE, status_code=307)

    return Guarded(Starlette(routes=[Route("/", start), *routes(context, token=token)]), Gate())


def _welcome(context: Context, port: int, token: str) -> str:
    only = "   (read-only)" if context.settings.read_only else ""
    return (
        f"open    http://{_HOST}:{port}{BASE}?token={token}\n"
        f"runs    {context.home.runs}{only}\n"
        f"remote  from another machine: ssh -L {port}:{_HOST}:{port} THIS-MACHINE, then the same address\n"
        "Ctrl-C ends it; runs go on.\n"
    )

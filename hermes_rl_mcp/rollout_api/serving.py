"""From a socket to a running server, and its orderly end.

Invariant: SIGTERM or SIGINT ends the process with exit status 0 within about two seconds, whatever connections are
open; a batch that was being written then is back in the queue and in the journal.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.loopback import bound_socket, is_loopback

log = logging.getLogger(__name__)

GRACE_S = 1
"""For answers being written at SIGTERM. The supervisor waits longer before it kills."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections themselves (5 to 90 s), so that none posts into one that we are closing."""


def listen(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    """A bound socket. Another address than loopback only if the person says so."""
    if not allow_remote and not is_loopback(host):
        raise InvalidValueError(
            f"{host} is not a loopback address: anybody in the network could read and poison the run.",
            hint="Use --host 127.0.0.1, or add --allow-remote if that is what you want.",
        )
    address = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise InvalidValueError(f"{host!r} is not an IP address.", hint="Use --host 127.0.0.1.") from None
    return bound_socket(address, port)


def adopt(fd: int) -> socket.socket:
    """The bound socket that the parent process passed by number."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise InvalidValueError(f"--listen-fd {fd} is not a socket: {error.strerror}.") from None
    sock.set_inheritable(False)
    return sock


async def serve(app: ASGIApp, sock: socket.socket, on_stop: Callable[[], None] = lambda: None) -> None:
    """Until SIGTERM or SIGINT; ``on_stop`` is called as soon as one arrives."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # it would write the secret path prefix, ten times a second
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        server.should_exit = True
        on_stop()

    # The server has handlers of its own, and raises the signal again once it has ended. These here take that one, else
    # the exit status would be that of a kill; and they take a signal that comes before the server's are in place.
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = sock.getsockname()[:2]
    log.info("Rollout API listens on %s port %d", host, port)
    await server.serve(sockets=[sock])
    log.info("Rollout API has ended")

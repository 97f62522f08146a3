"""Serves one ASGI application on a thread of its own, on a socket that somebody else may have bound.

Invariant: the event loop shares no thread with computing, so /health answers while the model trains.
"""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from hermes_rl_mcp.loopback import bound_socket

_KEEP_ALIVE_S = 75
_BACKLOG = 1024
_STOP_S = 5.0


class HttpServer:
    """Started by the constructor; ``stop`` is bounded."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_S)


def listener(host: str, port: int, listen_fd: int | None) -> socket.socket:
    """The inherited socket, else a fresh one. Raises PreflightError if the address is taken."""
    if listen_fd is not None:
        return socket.socket(fileno=listen_fd)
    return bound_socket(host, port)

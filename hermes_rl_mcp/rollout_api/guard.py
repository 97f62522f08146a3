"""Who may talk to a loopback server at all: no web page, no rebound host name, nobody without the secret prefix.

Invariant: a request that a browser made for a page, or that names a host other than this machine, reaches no endpoint.
"""

from __future__ import annotations

import ipaddress
import secrets

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

BROWSER_HEADERS = ("origin", "sec-fetch-site")
"""Browsers add them to what a page sends, and pages cannot take them away. Programs do not send them."""


class Guard:
    """ASGI middleware. ``path_prefix``: secret first path component, or empty. ``any_host`` only if a person asked."""

    def __init__(self, app: ASGIApp, *, path_prefix: str = "", any_host: bool = False) -> None:
        self._app = app
        self._prefix = path_prefix
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if any(name in headers for name in BROWSER_HEADERS):
            await _refuse(403, "Requests from web pages are refused.")(scope, receive, send)
        elif not self._any_host and not is_loopback(headers.get("host", "")):
            await _refuse(403, "The Host header does not name this machine's loopback address.")(scope, receive, send)
        elif (path := self._inside(scope["path"])) is None:
            await _refuse(404, "Not Found")(scope, receive, send)
        else:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    def _inside(self, path: str) -> str | None:
        """The path below the prefix, or None outside it."""
        if not self._prefix:
            return path
        first, _, rest = path[1:].partition("/")
        return f"/{rest}" if secrets.compare_digest(first.encode(), self._prefix.encode()) else None


def is_loopback(host: str) -> bool:
    """Whether a Host header or an address, with or without a port, means this machine."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    elif host.count(":") > 1:
        name = host
    else:
        name = host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refuse(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status)

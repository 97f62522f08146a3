"""What every request of the sampling endpoint must pass before any of it is parsed.

Invariant: only programs on this machine that know the run's path prefix get through; a web page in somebody's browser
does not, whatever host name it resolves to this machine.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 16 * 1024 * 1024
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]", "::1"}


class Guard:
    """ASGI middleware. ``loopback_only`` is off only for an endpoint that a person put on another address."""

    def __init__(self, app: ASGIApp, *, path_prefix: str, loopback_only: bool = True) -> None:
        self._app = app
        self._prefix = f"/{path_prefix}" if path_prefix else ""
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path: str = scope["path"]
        refusal = self._refusal(headers, path)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        inner = path[len(self._prefix) :]
        exchange = _Exchange(receive, send)
        await self._app({**scope, "path": inner, "raw_path": inner.encode()}, exchange.receive, exchange.send)
        if exchange.too_large:
            await _too_large()(scope, receive, send)

    def _refusal(self, headers: dict[str, str], path: str) -> JSONResponse | None:
        if "origin" in headers or "sec-fetch-site" in headers:
            return error_response(403, "Requests from web pages are refused.")
        if self._loopback_only and _host_name(headers.get("host", "")) not in _LOOPBACK:
            return error_response(403, "Only requests to a loopback address are answered.")
        if not path.startswith(f"{self._prefix}/"):
            return error_response(404, "There is nothing at this address.")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _too_large()
        return None


class _Exchange:
    """Counts a body without a declared length; over the cap the application sees its client go away, and whatever it
    answers to that is swallowed."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._size = 0
        self.too_large = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._size += len(message.get("body", b""))
        self.too_large = self.too_large or self._size > MAX_BODY_BYTES
        return {"type": "http.disconnect"} if self.too_large else message

    async def send(self, message: Message) -> None:
        if not self.too_large:
            await self._send(message)


def _too_large() -> JSONResponse:
    return error_response(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.")


def error_response(status: int, message: str, **headers: str) -> JSONResponse:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    content: dict[str, Any] = {"error": {"message": message, "type": kind}}
    return JSONResponse(content, status_code=status, headers=headers)


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rsplit(":", 1)[0].lower()

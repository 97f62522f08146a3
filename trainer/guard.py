"""What every request of the sampling endpoint must pass before any of it is parsed: who sends it, and how large it is.

Invariant: no more than ``MAX_BODY_BYTES`` of a body reach the application, whatever the client declares.
"""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hermes_rl_mcp.loopback import Refusal, admitted_path

MAX_BODY_BYTES = 16 * 1024 * 1024


class Guard:
    """ASGI middleware. ``any_host`` only for an endpoint that a person put on another address."""

    def __init__(self, app: ASGIApp, *, path_prefix: str, any_host: bool = False) -> None:
        self._app = app
        self._prefix = path_prefix
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = admitted_path(headers, scope["path"], path_prefix=self._prefix, any_host=self._any_host)
        if isinstance(path, Refusal):
            await error_response(path.status, path.sentence)(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        declared = headers.get("content-length", "0")
        exchange.too_large = not declared.isdigit() or int(declared) > MAX_BODY_BYTES
        if not exchange.too_large:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, exchange.receive, exchange.send)
        if exchange.too_large:
            await _too_large()(scope, receive, send)


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


def error_response(status: int, message: str, code: str | None = None, **headers: str) -> JSONResponse:
    return JSONResponse(error_content(status, message, code), status_code=status, headers=headers)


def error_content(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape. ``code`` is a word for programs."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

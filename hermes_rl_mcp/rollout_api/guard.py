"""The rule of ``hermes_rl_mcp.loopback`` in front of every endpoint."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hermes_rl_mcp.loopback import Refusal, admitted_path


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, path_prefix: str = "", any_host: bool = False) -> None:
        self._app = app
        self._prefix = path_prefix
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = admitted_path(Headers(scope=scope), scope["path"], path_prefix=self._prefix, any_host=self._any_host)
        if isinstance(path, Refusal):
            await JSONResponse({"detail": path.sentence}, status_code=path.status)(scope, receive, send)
        else:
            await self._app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

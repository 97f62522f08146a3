"""Who may talk to the HTTP server at all. Every request passes here before any route sees it.

Invariant: no request goes further whose Host this server does not answer to (a rebound name would), whose Origin is
not of this machine, this server or the operator's list, or which does not bear the token, if there is one.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hermes_rl_mcp.loopback import Refusal, is_loopback

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Gate:
    """What is let through. ``hosts``: NAME or NAME:PORT; ``origins``: SCHEME://NAME[:PORT]."""

    token: str | None = field(default=None, repr=False)
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    own_token_check: Collection[str] = ()
    """Paths (with all below) whose pages ask for the token themselves, because a browser sends no bearer token."""

    def refusal(self, headers: dict[str, str], path: str, address: str | None) -> Refusal | None:
        """``headers`` by lower-case name; ``address``: of this machine, that the connection came in on."""
        host = headers.get("host", "")
        if not self._answers_to(host, address):
            return Refusal(421, f"This server does not answer to the Host '{_shown(host)}'. See --accept-host.")
        origin = headers.get("origin")
        if origin is not None and not self._admits(origin, host):
            return Refusal(403, f"Pages of '{_shown(origin)}' may not call this server. See --accept-origin.")
        if origin is None and _fetched_by_another_site(headers):
            return Refusal(403, "Pages of other sites may not call this server.")
        if self.token is None or any(path == own or path.startswith(f"{own}/") for own in self.own_token_check):
            return None
        if bears(headers.get("authorization", ""), self.token):
            return None
        return Refusal(401, "This server wants 'Authorization: Bearer TOKEN' with the token that it was started with.")

    def _answers_to(self, host: str, address: str | None) -> bool:
        parts = _name_and_port(host)
        if parts is None:
            return False
        name, _ = parts
        if is_loopback(name) or name == address:  # nobody can rebind an address
            return True
        return host.lower() in self.hosts or name in self.hosts

    def _admits(self, origin: str, host: str) -> bool:
        origin = origin.lower()
        scheme, _, rest = origin.partition("://")
        if scheme not in _DEFAULT_PORTS or (parts := _name_and_port(rest)) is None:  # also "null"
            return False
        own = _name_and_port(host)
        if own is not None and (own[0], own[1] or _DEFAULT_PORTS[scheme]) == (
            parts[0],
            parts[1] or _DEFAULT_PORTS[scheme],
        ):
            return True  # a page of ours
        return is_loopback(parts[0]) or origin in self.origins


def _fetched_by_another_site(headers: dict[str, str]) -> bool:
    """As an image or a script, which comes without an Origin. Following a link to a page of ours is not meant."""
    return headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"


def bears(authorization: str, token: str) -> bool:
    """Whether the header's value is this bearer token; takes as long whatever is wrong with it."""
    scheme, _, given = authorization.partition(" ")
    right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return right and scheme.lower() == "bearer"


class Guarded:
    """An ASGI application behind a gate."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            before = f"{headers[name]}, " if name in headers else ""  # twice the same: matches nothing
            headers[name] = before + value.decode("latin-1")
        address = (scope.get("server") or (None, None))[0]
        refusal = self._gate.refusal(headers, scope["path"], address)
        if scope["type"] != "http":  # no route here speaks anything else
            await send({"type": "websocket.close", "code": 1008})
        elif refusal is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(refusal, send)


async def _refuse(refusal: Refusal, send: Send) -> None:
    body = refusal.sentence.encode("utf-8", "replace")
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="hermes-rl"'))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _name_and_port(host: str) -> tuple[str, int | None] | None:
    """Of ``name``, ``name:port`` or ``[address]:port``; None for anything else."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    return parts.hostname, port


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:100])

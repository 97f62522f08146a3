"""Who may see the pages and who may stop a run.

A browser brings the token once, in the address that was printed at start or in a form, and gets a cookie that proves
it without containing it: cookies go to every port of a host, so another program on this machine may come to see it.
A change needs the cookie, a second proof that only a page of ours holds, and headers that no page of others can send.

Invariant: without the token nothing is changed, and where there is one nothing is shown.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from hermes_rl_mcp.loopback import is_loopback

SESSION_S = 7 * 86_400
"""A run may take days; who watches it should not have to come back with the token."""
CONTENT_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with "no-referrer" a form's Origin would be null, which is what is asked for
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Access:
    """Made of the token. ``read_only`` takes away what changes anything, whoever asks."""

    def __init__(self, token: str | None, *, read_only: bool, clock: Callable[[], float] = time.time) -> None:
        self._token = token.encode() if token else None
        self._clock = clock
        self.has_token = self._token is not None
        self.may_stop = self.has_token and not read_only
        name = hashlib.sha256(self._token or b"").hexdigest()[:8]
        self.cookie = f"hermes_rl_{name}"
        """Two servers on one host have two names."""

    def admits(self, request: HTTPConnection) -> bool:
        """Whether the pages are shown. Without a token only to this machine, by a name that no web page can claim."""
        if self._token is None:
            return is_loopback(request.headers.get("host", ""))
        return self._bearer(request) or self._session_holds(request.cookies.get(self.cookie, ""))

    def knows(self, token: str) -> bool:
        """Whether this is the token."""
        return self._token is not None and hmac.compare_digest(token.encode(errors="replace"), self._token)

    def begin_session(self, response: Response, *, path: str, secure: bool) -> None:
        """Sets the cookie."""
        expires = str(int(self._clock()) + SESSION_S)
        value = f"{expires}.{self._proof('session', expires)}"
        response.set_cookie(
            self.cookie, value, max_age=SESSION_S, path=path, secure=secure, httponly=True, samesite="strict"
        )

    def form_proof(self, request: HTTPConnection) -> str:
        """What a form of this session carries."""
        return self._proof("form", request.cookies.get(self.cookie, ""))

    def may_change(self, request: Request, proof: str) -> bool:
        """Whether a request that changes something comes from a person who has the token, by a page of ours."""
        if not self.may_stop or not self.admits(request) or not same_origin(request):
            return False
        return self._bearer(request) or hmac.compare_digest(proof.encode(), self.form_proof(request).encode())

    def _bearer(self, request: HTTPConnection) -> bool:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.knows(value.strip())

    def _session_holds(self, value: str) -> bool:
        expires, _, proof = value.partition(".")
        if not hmac.compare_digest(proof.encode(), self._proof("session", expires).encode()):
            return False
        return expires.isdecimal() and int(expires) > self._clock()

    def _proof(self, what: str, of: str) -> str:
        assert self._token is not None
        return hmac.new(self._token, f"hermes-rl dashboard {what} {of}".encode(), hashlib.sha256).hexdigest()


def same_origin(request: HTTPConnection) -> bool:
    """Browsers say where a request comes from, and a page cannot change what they say; programs say nothing."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")

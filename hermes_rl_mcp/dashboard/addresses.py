"""The dashboard's addresses. ``routes`` is mounted by the HTTP server and by ``hermes-rl dashboard``.

Whoever mounts them leaves asking for the token to them: a browser cannot send it as a header.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import get_args
from urllib.parse import parse_qs

from anyio import to_thread
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.contracts.sections import LogName
from hermes_rl_mcp.dashboard import views
from hermes_rl_mcp.dashboard.access import HEADERS, Access, same_origin
from hermes_rl_mcp.dashboard.compare_page import compare_page
from hermes_rl_mcp.dashboard.html import el
from hermes_rl_mcp.dashboard.layout import FILES, STATIC, Site, message, page
from hermes_rl_mcp.dashboard.log_page import log_page
from hermes_rl_mcp.dashboard.run_page import run_page
from hermes_rl_mcp.dashboard.runs_page import runs_page
from hermes_rl_mcp.dashboard.series import Series
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, NotFoundError, UnknownRunError, UnreadableRunError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.side_by_side import MOST_RUNS
from hermes_rl_mcp.redact import redact_text, secret_values
from hermes_rl_mcp.runs import launch

log = logging.getLogger(__name__)

BASE = "/dashboard"
_FORM_BYTES = 4_096
_TEXT_CHARS = 100
_DIGITS = 15
"""Of a step or an offset."""

Handler = Callable[[Request, Site], Awaitable[Response]]


def routes(context: Context, *, token: str | None) -> list[Route]:
    """All routes below ``/dashboard``. Without a token the pages are shown to this machine and nothing can be stopped;
    nor can it on a read-only server."""
    pages = _Pages(context, Access(token, read_only=context.settings.read_only, clock=context.clock))
    return [
        Route(BASE, pages.shown(pages.list)),
        Route(f"{BASE}/", pages.shown(pages.list)),
        Route(f"{BASE}/sign-in", pages.sign_in, methods=["POST"]),
        Route(f"{BASE}/static/{{name}}", pages.static),
        Route(f"{BASE}/compare", pages.shown(pages.compare)),
        Route(f"{BASE}/runs/{{run_id}}", pages.shown(pages.run)),
        Route(f"{BASE}/runs/{{run_id}}/logs/{{process}}", pages.shown(pages.log)),
        Route(f"{BASE}/runs/{{run_id}}/stop", pages.shown(pages.stop), methods=["POST"]),
    ]


class _Pages:
    def __init__(self, context: Context, access: Access) -> None:
        self._context = context
        self._access = access
        self._series = Series(context.runs)
        if context.settings.read_only:
            self._note = "read-only"
        else:
            self._note = "" if access.may_stop else "no token: nothing can be stopped here"

    def shown(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Asks for the token, and makes pages of errors."""

        async def handle(request: Request) -> Response:
            site = self._site(request)
            if not self._access.admits(request):
                return self._asked(request, site)
            try:
                response = await handler(request, site)
            except HermesRLError as error:
                response = self._problem(site, error)
            except Exception as error:  # one page that cannot be made must not end the others
                log.error("the dashboard cannot make %s", request.url.path, exc_info=error)
                sentence = "This page cannot be made. The server's log says why."
                response = _html(message(site, "Something went wrong", sentence), 500)
            return _sealed(response)

        return handle

    async def list(self, request: Request, site: Site) -> Response:
        query = request.query_params
        wanted = views.Filter(
            query.get("text", "")[:_TEXT_CHARS].strip(), query.get("status", ""), _whole(query, "offset") or 0
        )
        found = await to_thread.run_sync(views.listed, self._context, self._series, wanted)
        return _fresh(request, runs_page(site, found, wanted))

    async def run(self, request: Request, site: Site) -> Response:
        reader = await RunReader.open(self._context, request.path_params["run_id"])
        asked = request.query_params
        query = views.RunQuery(_whole(asked, "step"), _log_name(asked.get("log", "trainer")))
        view = await to_thread.run_sync(views.run_view, self._context, self._series, reader, query)
        proof = self._access.form_proof(request) if self._access.may_stop else ""
        return _fresh(request, await to_thread.run_sync(run_page, site, view, query, proof))

    async def compare(self, request: Request, site: Site) -> Response:
        chosen = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(chosen) <= MOST_RUNS:
            raise InvalidValueError(f"{len(chosen)} runs were chosen.", hint=f"Choose 2 to {MOST_RUNS} in the list.")
        found = await views.side_by_side(self._context, self._series, chosen)
        return _fresh(request, await to_thread.run_sync(compare_page, site, found))

    async def log(self, request: Request, site: Site) -> Response:
        reader = await RunReader.open(self._context, request.path_params["run_id"])
        process = _log_name(request.path_params["process"])
        offset = _whole(request.query_params, "offset")
        found = await to_thread.run_sync(
            views.whole_log, self._context, reader, process, -1 if offset is None else offset
        )
        at_end = offset is None
        follows = at_end and not reader.record.status.terminal
        return _fresh(request, log_page(site, reader.record.run_id, found, at_end=at_end, follows=follows))

    async def stop(self, request: Request, site: Site) -> Response:
        form = await _form(request)
        if not self._access.may_change(request, form.get("proof", "")):
            why = "Reload the run's page and try again." if self._access.may_stop else "This server stops nothing."
            sentence = "This request did not come from a page of this session."
            return _html(message(site, "Not stopped", sentence, why), 403)
        run_id = request.path_params["run_id"]
        record: RunRecord = await launch.stop(self._context.home, run_id, "dashboard")
        log.info("run %s: stop asked for on the dashboard; it is %s", run_id, record.status.value)
        return RedirectResponse(site.run(run_id), status_code=303)

    async def sign_in(self, request: Request) -> Response:
        """A token in a form, for whoever has it but not the address with it."""
        site = self._site(request)
        form = await _form(request)
        if not same_origin(request) or not self._access.knows(form.get("token", "").strip()):
            return _sealed(_html(_ask_page(site, wrong=True), 401))
        response = RedirectResponse(site.base, status_code=303)
        self._begin_session(request, response, site)
        return _sealed(response)

    async def static(self, request: Request) -> Response:
        """Style, script and icon: no secret, so nobody is asked for a token."""
        name = request.path_params["name"]
        if name not in FILES:
            return _sealed(Response(status_code=404))
        response = Response((STATIC / name).read_bytes(), media_type=FILES[name])
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable" if request.url.query else "no-cache"
        return _sealed(response)

    def _asked(self, request: Request, site: Site) -> Response:
        """For the token; with it in the address, one step to the same page without it."""
        if not self._access.has_token:
            sentence = "This server has no token, so its pages are shown to its own machine alone."
            return _sealed(_html(message(site, "Not shown here", sentence, "Open them at 127.0.0.1 there."), 403))
        given = request.query_params.get("token")
        if given is None or request.method not in ("GET", "HEAD") or not self._access.knows(given):
            return _sealed(_html(_ask_page(site, wrong=given is not None), 401))
        # A page, no redirect: after one, a browser that came from elsewhere would not send the cookie.
        here = request.scope.get("root_path", "") + request.url.path.removeprefix(request.scope.get("root_path", ""))
        response = _html(_welcome_page(site, here))
        self._begin_session(request, response, site)
        return _sealed(response)

    def _begin_session(self, request: Request, response: Response, site: Site) -> None:
        self._access.begin_session(response, path=site.base, secure=request.url.scheme == "https")

    def _site(self, request: Request) -> Site:
        return Site(f"{request.scope.get('root_path', '')}{BASE}", self._access.may_stop, self._note)

    def _problem(self, site: Site, error: HermesRLError) -> Response:
        secrets = secret_values(self._context.operator.environ)
        sentence = redact_text(error.message, secrets)
        if isinstance(error, UnknownRunError):
            return _html(message(site, "No such run", sentence, "It may have been deleted."), 404)
        if isinstance(error, UnreadableRunError):
            return _html(message(site, "This run cannot be shown", sentence, redact_text(error.hint, secrets)), 200)
        status = 404 if isinstance(error, NotFoundError) else 400
        return _html(message(site, "That cannot be shown", sentence, redact_text(error.hint, secrets)), status)


def _welcome_page(site: Site, here: str) -> str:
    text = el("p", el("a", "Continue", href=here))
    return page(site, "Hermes RL", el("section", el("h1", "Signed in"), text, class_="card narrow"), goes_to=here)


def _ask_page(site: Site, *, wrong: bool) -> str:
    field = el("input", type="password", name="token", autocomplete="off", required=True, autofocus=True)
    form = el(
        "form",
        el("label", "Token", field),
        el("button", "Sign in", class_="button solid"),
        method="post",
        action=f"{site.base}/sign-in",
        class_="sign-in",
    )
    return page(
        site,
        "Sign in · Hermes RL",
        el(
            "section",
            el("h1", "Sign in"),
            el("p", "That token is not the one of this server.", class_="wrong", role="alert") if wrong else None,
            el("p", "Open the address that was printed when the dashboard was started, or paste the server's token."),
            form,
            class_="card narrow",
        ),
    )


def _html(text: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(text, status_code=status)


def _fresh(request: Request, text: str) -> Response:
    """The page, or word that it is as the browser has it."""
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return HTMLResponse(text, headers={"ETag": tag})


def _sealed(response: Response) -> Response:
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("Cache-Control", "no-store")
    return response


async def _form(request: Request) -> dict[str, str]:
    """Fields of a small form; of a larger one none."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _FORM_BYTES:
            return {}
    return {name: values[0] for name, values in parse_qs(data.decode("utf-8", "replace")).items()}


def _whole(query: QueryParams, name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
        raise InvalidValueError(f"{name}={text[:40]!r} is not a whole number.")
    return int(text)


def _log_name(text: str) -> LogName:
    names: tuple[LogName, ...] = get_args(LogName)
    for name in names:
        if name == text:
            return name
    raise NotFoundError(f"There is no log {text[:40]!r}.", hint=f"There are: {', '.join(names)}.")

"""web_search and web_extract.

Invariant: pages come from public addresses, or from the operator's corpus and then from nowhere else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.settings import ALLOW_PRIVATE_URLS, SEARCH_CORPUS, is_on, setting
from hermes_rl_mcp.agent.tools import search_backends
from hermes_rl_mcp.agent.tools.corpus import open_corpus
from hermes_rl_mcp.agent.tools.fetching import FetchError, Page, fetch
from hermes_rl_mcp.agent.tools.schema import arguments, text, texts, whole

MAX_RESULTS = 20
MAX_URLS = 5
MAX_PAGE_CHARS = 100_000
_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml", "application/javascript")


def web_search(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{success, data: {web: [{title, url, description, position}]}}``."""
    found = search_backends.search(context.settings, args["query"], min(args.get("limit") or 5, MAX_RESULTS))
    rows: list[JsonValue] = [
        {"title": one.title, "url": one.url, "description": one.description, "position": position}
        for position, one in enumerate(found, 1)
    ]
    return {"success": True, "data": {"web": rows}}


def web_extract(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{results: [{url, title, content, error}]}`` in the order of ``urls``."""
    with ThreadPoolExecutor(MAX_URLS) as pool:
        return {"results": [*pool.map(lambda url: _extracted(context, url), args["urls"])]}


def _extracted(context: CallContext, url: str) -> JsonValue:
    try:
        title, content = _page(context.settings, url)
    except FetchError as error:
        return {"url": url, "title": "", "content": "", "error": str(error)}
    if len(content) > MAX_PAGE_CHARS:
        content = f"{content[:MAX_PAGE_CHARS]}\n... [{len(content) - MAX_PAGE_CHARS} more characters]"
    return {"url": url, "title": title, "content": content, "error": None}


def _page(settings: Mapping[str, str], url: str) -> tuple[str, str]:
    """Title and text."""
    if search_backends.backend(settings) == "corpus":
        page = open_corpus(setting(settings, SEARCH_CORPUS)).page(url)
        if page is None:
            raise FetchError("There is no such page. Take a URL that web_search gave.")
        return page
    return _read(fetch(url, allow_private=is_on(settings, ALLOW_PRIVATE_URLS)))


def _read(page: Page) -> tuple[str, str]:
    if page.content_type in _HTML:
        return _of_html(page)
    if page.content_type.startswith("text/") or page.content_type in _TEXT or page.content_type.endswith("+json"):
        return "", _decoded(page)
    raise FetchError(f"The page is of type {page.content_type[:80]}, which cannot be read as text.")


def _of_html(page: Page) -> tuple[str, str]:
    import trafilatura  # an extra, and 300 ms

    document = _decoded(page)
    found = trafilatura.bare_extraction(document, url=page.url, with_metadata=True, include_links=False)
    content = trafilatura.extract(document, url=page.url, output_format="markdown")
    if not content:
        raise FetchError("The page has no text that could be read; it may need a browser.")
    return str(getattr(found, "title", None) or ""), content


def _decoded(page: Page) -> str:
    try:
        return page.data.decode(page.charset or "utf-8", errors="replace")
    except LookupError:
        return page.data.decode(errors="replace")


def _extract_missing(settings: Mapping[str, str]) -> str | None:
    try:
        if search_backends.backend(settings) == "corpus":
            return None
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("trafilatura") is None:
        return "pip install 'hermes-rl-mcp[agent]' to read pages"
    return None


TOOLS = (
    Tool(
        "web_search",
        "web",
        "Search the web. Gives titles, URLs and short descriptions; read pages with web_extract.",
        arguments(
            ("query",),
            query=text("What to look for", minLength=1),
            limit=whole(f"How many results (at most {MAX_RESULTS})", minimum=1, default=5),
        ),
        web_search,
        search_backends.missing,
    ),
    Tool(
        "web_extract",
        "web",
        f"Read web pages as text. Takes up to {MAX_URLS} URLs at once.",
        arguments(("urls",), urls=texts("Pages to read", minItems=1, maxItems=MAX_URLS)),
        web_extract,
        _extract_missing,
    ),
)

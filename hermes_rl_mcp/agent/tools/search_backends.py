"""Who answers a web search: an offline corpus, a SearXNG server, Tavily or Brave, as the operator's settings say.

Invariant: with a corpus as the backend nothing leaves this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from hermes_rl_mcp.agent import settings as names
from hermes_rl_mcp.agent.settings import setting
from hermes_rl_mcp.agent.tools.corpus import Found, open_corpus
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

TIMEOUT_S = 30.0
_NEEDS = {
    "corpus": names.SEARCH_CORPUS,
    "searxng": names.SEARXNG_URL,
    "tavily": names.TAVILY_API_KEY,
    "brave": names.BRAVE_API_KEY,
}
_SETS_UP = f"set one of {', '.join(_NEEDS.values())}"


def backend(settings: Mapping[str, str]) -> str | None:
    """The chosen backend, None if none is set up. Raises InvalidValueError for a wrong or incomplete choice."""
    chosen = setting(settings, names.SEARCH_BACKEND).lower()
    if not chosen:
        return next((one for one, needed in _NEEDS.items() if setting(settings, needed)), None)
    if chosen not in _NEEDS:
        raise InvalidValueError(f"{names.SEARCH_BACKEND} is {chosen[:40]!r}.", hint=f"It can be: {', '.join(_NEEDS)}.")
    if not setting(settings, _NEEDS[chosen]):
        raise InvalidValueError(f"{names.SEARCH_BACKEND} is {chosen}, but {_NEEDS[chosen]} is not set.", hint="Set it.")
    return chosen


def missing(settings: Mapping[str, str]) -> str | None:
    """Why there is no search, and what to do."""
    try:
        return None if backend(settings) else f"no search is set up; {_SETS_UP}"
    except InvalidValueError as error:
        return str(error)


def search(settings: Mapping[str, str], query: str, limit: int) -> list[Found]:
    """Up to ``limit`` results, the best first. Raises EndpointError."""
    chosen = backend(settings)
    if chosen is None:
        raise InvalidValueError("No search is set up.", hint=f"The operator can {_SETS_UP}.")
    if chosen == "corpus":
        return open_corpus(setting(settings, names.SEARCH_CORPUS)).search(query, limit)
    return _ONLINE[chosen](settings, query, limit)[:limit]


def _searxng(settings: Mapping[str, str], query: str, limit: int) -> list[Found]:
    url = setting(settings, names.SEARXNG_URL).rstrip("/") + "/search"
    answer = _asked("SearXNG", "GET", url, params={"q": query, "format": "json"})
    return _found(answer.get("results"), "content")


def _tavily(settings: Mapping[str, str], query: str, limit: int) -> list[Found]:
    url = (setting(settings, names.TAVILY_URL) or "https://api.tavily.com").rstrip("/") + "/search"
    key = {"authorization": f"Bearer {setting(settings, names.TAVILY_API_KEY)}"}
    answer = _asked("Tavily", "POST", url, headers=key, json={"query": query, "max_results": limit})
    return _found(answer.get("results"), "content")


def _brave(settings: Mapping[str, str], query: str, limit: int) -> list[Found]:
    url = (setting(settings, names.BRAVE_URL) or "https://api.search.brave.com").rstrip("/") + "/res/v1/web/search"
    key = {"x-subscription-token": setting(settings, names.BRAVE_API_KEY), "accept": "application/json"}
    answer = _asked("Brave", "GET", url, headers=key, params={"q": query, "count": min(limit, 20)})
    return _found((answer.get("web") or {}).get("results"), "description")


_ONLINE: Mapping[str, Callable[[Mapping[str, str], str, int], list[Found]]] = {
    "searxng": _searxng,
    "tavily": _tavily,
    "brave": _brave,
}


def _asked(who: str, method: str, url: str, **request: Any) -> dict[str, Any]:
    try:
        response = httpx.request(method, url, timeout=TIMEOUT_S, **request)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EndpointError(f"{who} did not answer: {type(error).__name__}.", hint="Try again later.") from None
    if response.status_code != 200:
        hint = {401: "Its key is wrong.", 403: "Its key is wrong, or JSON answers are off.", 429: "Ask less often."}
        raise EndpointError(
            f"{who} answered {response.status_code}.", hint=hint.get(response.status_code, "Try again later.")
        )
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EndpointError(f"{who} answered with something that is no JSON object.", hint="Look at its address.")
    return answer


def _found(results: Any, description: str) -> list[Found]:
    rows = [one for one in results or [] if isinstance(one, dict) and one.get("url")]
    return [Found(str(one["url"]), str(one.get("title") or ""), str(one.get(description) or "")) for one in rows]

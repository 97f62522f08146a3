"""The frame around every page."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from hermes_rl_mcp import __version__
from hermes_rl_mcp.contracts.runs import UNKNOWN, UNREADABLE
from hermes_rl_mcp.dashboard.html import Node, Safe, el, joined

STATIC = Path(__file__).with_name("static")
FILES = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}
_RELOAD_S = 10
"""Between two reloads where there is no script, long enough to read and scroll."""
_GROUPS = {
    "queued": "waiting",
    "starting": "waiting",
    "running": "going",
    "stopping": "waiting",
    "stopped": "ended",
    "completed": "good",
    "failed": "bad",
    "interrupted": "bad",
    UNREADABLE: "bad",
    UNKNOWN: "waiting",
}


class Site(NamedTuple):
    """Where the pages are, and what this server lets people do."""

    base: str
    """Path before all others: ``/dashboard``."""
    may_stop: bool = False
    note: str = ""
    """Why nothing can be stopped here, if so."""

    def run(self, run_id: str) -> str:
        return f"{self.base}/runs/{run_id}"

    def static(self, name: str) -> str:
        """With a mark of its content, so that a new version is not shown with an old style."""
        return f"{self.base}/static/{name}?{_mark(name)}"


def page(site: Site, title: str, *body: Node, refresh_s: float | None = None, goes_to: str | None = None) -> str:
    """A whole document. With ``refresh_s`` its parts that are marked live are fetched anew so often; ``goes_to`` is
    opened at once in its place."""
    head = [
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("link", rel="icon", href=site.static("icon.svg"), type="image/svg+xml"),
        el("link", rel="stylesheet", href=site.static("style.css")),
    ]
    if goes_to is not None:
        head.append(el("meta", http_equiv="refresh", content=f"0;url={goes_to}"))
    if refresh_s is not None:
        head.append(el("noscript", el("meta", http_equiv="refresh", content=_RELOAD_S)))
    head.append(el("script", src=site.static("live.js"), defer=True))
    icon = el("img", src=site.static("icon.svg"), alt="", width=24, height=24)
    bar = el(
        "header",
        el("a", icon, "Hermes RL", href=site.base, class_="brand"),
        el("span", site.note, class_="site-note") if site.note else None,
        el("output", id="live", class_="live", hidden=True),
        class_="top",
    )
    document = el(
        "html",
        el("head", head),
        el(
            "body",
            el("a", "Skip to content", href="#content", class_="skip"),
            bar,
            el("main", body, id="content"),
            el("footer", f"hermes-rl-mcp {__version__}. Quoted text was written by models, environments and logs."),
            data_refresh_s=refresh_s,
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}"


def live(key: str, *children: Node, tag: str = "section", class_: str = "") -> Safe:
    """A part that is fetched anew."""
    return el(tag, joined(children), id=key, data_live=True, class_=class_ or None)


def crumbs(*parts: Node) -> Safe:
    """The way from the list to here."""
    return el("nav", parts, class_="crumbs", aria_label="Where you are")


def pill(status: str) -> Safe:
    """A run's status."""
    return el("span", status, class_=f"pill {_GROUPS.get(status, 'ended')}")


def message(site: Site, title: str, sentence: str, hint: str = "") -> str:
    """A page that says one thing."""
    return page(
        site,
        title,
        el("section", el("h1", title), el("p", sentence), el("p", hint) if hint else None, class_="card narrow"),
        el("p", el("a", "All runs", href=site.base)),
    )


def _mark(name: str) -> str:
    return hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:10]

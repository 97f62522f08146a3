"""A whole log, window by window."""

from __future__ import annotations

from hermes_rl_mcp.contracts.sections import LogPage
from hermes_rl_mcp.dashboard.html import Safe, el
from hermes_rl_mcp.dashboard.layout import Site, crumbs, live, page
from hermes_rl_mcp.dashboard.run_parts import LOGS
from hermes_rl_mcp.dashboard.views import WHOLE_LOG_BYTES

_REFRESH_S = 3.0


def log_page(site: Site, run_id: str, found: LogPage, *, at_end: bool, follows: bool) -> str:
    """``at_end``: it is the end of the log; ``follows``: which may still grow."""
    here = f"{site.run(run_id)}/logs"
    title = f"{LOGS[found.process]} log of {run_id}"
    names = [
        el("a", name, href=f"{here}/{key}", aria_current="page" if key == found.process else None)
        for key, name in LOGS.items()
    ]
    return page(
        site,
        f"{title} · Hermes RL",
        crumbs(el("a", "Runs", href=site.base), el("a", run_id, href=site.run(run_id)), el("span", "Logs")),
        el("h1", title, class_="alone"),
        live(
            "log",
            el("nav", names, class_="tabs", aria_label="Logs"),
            el("pre", found.text or "Nothing was written here.", class_="log whole", data_keep_end=at_end, tabindex=0),
            _windows(f"{here}/{found.process}", found),
            tag="div",
            class_="card flush",
        ),
        refresh_s=_REFRESH_S if follows else None,
    )


def _windows(here: str, found: LogPage) -> Safe:
    first = found.offset
    last = found.next_offset if found.next_offset is not None else found.total

    def to(offset: int, name: str, *, there: bool) -> Safe:
        return el("a", name, href=f"{here}?offset={offset}") if there else el("span", name, class_="off")

    return el(
        "nav",
        to(0, "Beginning", there=first > 0),
        to(max(0, first - WHOLE_LOG_BYTES), "Older", there=first > 0),
        el("span", f"bytes {first:,} to {last:,} of {found.total:,}"),
        to(last, "Newer", there=last < found.total),
        el("a", "End", href=here),
        class_="pages",
        aria_label="Parts of the log",
    )

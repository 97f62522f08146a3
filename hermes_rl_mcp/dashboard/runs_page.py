"""The list of runs."""

from __future__ import annotations

from urllib.parse import urlencode

from hermes_rl_mcp.contracts.runs import UNREADABLE, RunStatus
from hermes_rl_mcp.dashboard.chart import bar, spark
from hermes_rl_mcp.dashboard.html import Node, Safe, el
from hermes_rl_mcp.dashboard.layout import Site, live, page, pill
from hermes_rl_mcp.dashboard.views import ROWS, Filter, RunList, RunRow
from hermes_rl_mcp.dashboard.words import moment, number

_REFRESH_S = 3.0


def runs_page(site: Site, found: RunList, wanted: Filter) -> str:
    """Newest first."""
    active = "nothing is running" if not found.active else f"{found.active} active"
    title = f"{found.active} active runs" if found.active > 1 else ("1 active run" if found.active else "Runs")
    head = el(
        "div",
        el("h1", "Runs"),
        el("p", f"{found.all_runs:,} in all, {active}", class_="muted"),
        class_="page-head",
    )
    if not found.all_runs:
        body: Node = el(
            "div",
            el("p", "No runs yet."),
            el("p", "An agent starts one with rl_start_training; ", el("code", "hermes-rl demo"), " makes one, too."),
            class_="card empty",
        )
    elif not found.rows:
        body = el("div", el("p", "No run matches."), el("p", el("a", "Show all", href=site.base)), class_="card empty")
    else:
        body = el(
            "form",
            el("div", _table(site, found.rows), class_="card table-card"),
            el("button", "Compare chosen runs", class_="button compare") if len(found.rows) > 1 else None,
            method="get",
            action=f"{site.base}/compare",
        )
    return page(
        site,
        f"{title} · Hermes RL",
        live("runs-head", head, tag="div"),
        _filters(site, wanted) if found.all_runs else None,
        live("runs", body, _pages(site, found, wanted)),
        refresh_s=_REFRESH_S,
    )


def _filters(site: Site, wanted: Filter) -> Safe:
    statuses = (*(one.value for one in RunStatus), UNREADABLE)
    options = [el("option", one, value=one, selected=one == wanted.status) for one in statuses]
    options.insert(0, el("option", "any status", value=""))
    return el(
        "form",
        el(
            "input",
            type="search",
            name="text",
            value=wanted.text,
            placeholder="Run, environment or model",
            aria_label="Search runs",
            maxlength=100,
        ),
        el("select", options, name="status", aria_label="Status"),
        el("button", "Filter", class_="button"),
        el("a", "Clear", href=site.base, class_="clear") if wanted.text or wanted.status else None,
        method="get",
        action=site.base,
        class_="filters",
        role="search",
    )


def _table(site: Site, rows: list[RunRow]) -> Safe:
    heads = ("Run", "Status", "Environment and model", "Progress", "Reward", "Started")
    return el(
        "table",
        el("thead", el("tr", [el("th", head, scope="col") for head in heads])),
        el("tbody", [_row(site, row) for row in rows]),
        class_="runs",
    )


def _row(site: Site, row: RunRow) -> Safe:
    progress: Node = None
    if row.total_steps:
        progress = [el("span", f"{row.step:,} / {row.total_steps:,}", class_="steps"), bar(row.step / row.total_steps)]
    notes = [el("span", flag.replace("_", " "), class_="tag warn") for flag in row.flags]
    if row.note:
        notes.append(el("span", row.note, class_="note"))
    drawn = spark(row.spark)
    choice = el("input", type="checkbox", name="run", value=row.run_id, aria_label=f"Compare {row.run_id}")
    return el(
        "tr",
        el("th", choice, el("a", row.run_id, href=site.run(row.run_id), class_="run-id"), scope="row"),
        el("td", pill(row.status), data_label="Status"),
        el("td", row.environment, el("span", row.model, class_="model"), el("div", notes) if notes else None),
        el("td", progress, class_="progress", data_label="Progress"),
        el("td", drawn, el("span", number(row.reward), class_="value") if row.spark else None, class_="reward"),
        el("td", moment(row.created_at), class_="when"),
    )


def _pages(site: Site, found: RunList, wanted: Filter) -> Safe | None:
    if found.total <= ROWS:
        return None

    def at(offset: int) -> str:
        return f"{site.base}?{urlencode({'text': wanted.text, 'status': wanted.status, 'offset': offset})}"

    last = min(found.offset + ROWS, found.total)
    return el(
        "nav",
        el("a", "Newer", href=at(max(0, found.offset - ROWS))) if found.offset else el("span", "Newer", class_="off"),
        el("span", f"{found.offset + 1} to {last} of {found.total:,}"),
        el("a", "Older", href=at(found.offset + ROWS)) if last < found.total else el("span", "Older", class_="off"),
        class_="pages",
        aria_label="Pages of runs",
    )

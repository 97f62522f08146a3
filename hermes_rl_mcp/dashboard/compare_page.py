"""Several runs side by side: their curves in the same axes, what was set differently, and what the evaluations say."""

from __future__ import annotations

from pydantic import JsonValue

from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.dashboard import curves
from hermes_rl_mcp.dashboard.chart import figure
from hermes_rl_mcp.dashboard.html import Node, Safe, el
from hermes_rl_mcp.dashboard.layout import Site, crumbs, live, page, pill
from hermes_rl_mcp.dashboard.run_parts import table
from hermes_rl_mcp.dashboard.views import SideBySide
from hermes_rl_mcp.dashboard.words import NONE, number, percent

_REFRESH_S = 5.0
_FEW = 5


def compare_page(site: Site, found: SideBySide) -> str:
    """In the order in which they were chosen."""
    drawn = [figure(chart, key=str(index)) for index, chart in enumerate(curves.of_several(found.curves))]
    nothing = el("div", el("p", "None of these runs has taken a step."), class_="card empty")
    return page(
        site,
        "Runs side by side \u00b7 Hermes RL",
        crumbs(el("a", "Runs", href=site.base), el("span", "Side by side")),
        el("h1", "Runs side by side", class_="alone"),
        live("curves", el("div", drawn, class_="charts") if any(drawn) else nothing),
        live("outcome", el("h2", "Outcome"), el("div", _outcome(site, found), class_="card table-card")),
        live("settings", el("h2", "Set differently"), el("div", _differences(found), class_="card table-card")),
        refresh_s=_REFRESH_S,
    )


def _outcome(site: Site, found: SideBySide) -> Safe:
    rows: list[list[Node]] = []
    for record in found.records:
        curve = found.curves[record.run_id]
        rewards = [value for value in curve.values.get("reward/mean", ()) if value == value]
        rows.append(
            [
                el("a", record.run_id, href=site.run(record.run_id), class_="run-id"),
                pill(record.status.value),
                [record.environment, el("span", record.base_model, class_="model")],
                f"{curve.steps[-1] if len(curve) else 0:,} / {record.total_steps:,}",
                f"{number(_mean(rewards[:_FEW]))} \u2192 {number(_mean(rewards[-_FEW:]))}",
                _verdict(found.evaluations.get(record.run_id)),
            ]
        )
    return table(
        ("Run", "Status", "Environment and model", "Steps", "Reward, first and last 5 steps", "Evaluation"), rows
    )


def _verdict(found: Evaluation | None) -> str:
    if found is None:
        return NONE
    if found.base is None or found.adapter is None:
        return f"{found.status}: {found.reason}"
    said = percent if found.measure == "accuracy" else number
    return f"{found.verdict} ({said(found.base.accuracy)} \u2192 {said(found.adapter.accuracy)})"


def _differences(found: SideBySide) -> Node:
    if not found.differences:
        return el("p", "Nothing.", class_="muted log-empty")
    ids = [record.run_id for record in found.records]
    rows: list[list[Node]] = [
        [el("code", name), *(_said(values.get(run_id)) for run_id in ids)] for name, values in found.differences
    ]
    return table(("Field", *ids), rows)


def _said(value: JsonValue) -> str:
    return "not set" if value is None else (str(value) if value != "" else "empty")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None

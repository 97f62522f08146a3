"""Parts of a run's page below the curves. Texts in them were written by models, environments and programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from hermes_rl_mcp.contracts.records import RolloutLine
from hermes_rl_mcp.dashboard.chart import arms
from hermes_rl_mcp.dashboard.html import Node, Safe, el
from hermes_rl_mcp.dashboard.layout import Site, pill
from hermes_rl_mcp.dashboard.views import Rollouts, RunQuery, RunView
from hermes_rl_mcp.dashboard.words import NONE, clock, moment, number
from hermes_rl_mcp.quantities import size

LOGS = {"trainer": "Trainer", "env": "Environment", "api": "Rollout API", "supervisor": "Supervisor"}
_TABLE_STEPS = 12
_TABLE = {
    "reward/mean": "reward",
    "train/percent_correct": "correct",
    "rollouts/length_mean": "length",
    "train/loss": "loss",
    "train/grad_norm": "grad norm",
    "policy/version": "version",
    "policy/lag": "lag",
    "time/step_s": "seconds",
}


def verdict(view: RunView) -> Node:
    """Base against adapter on held-out items, and one prompt before and after."""
    parts: list[Node] = []
    found = view.held_out
    if found is not None and found.base is not None and found.adapter is not None:
        kind = "good" if (found.low or 0.0) > 0 else ("bad" if (found.high or 0.0) < 0 else "flat")
        measure = f"{found.measure} on {found.items} held-out items"
        measure += f", {found.repeats} answers each" if found.repeats > 1 else ""
        measure += f"; {found.left_out} pairs of answers left out" if found.left_out else ""
        parts.append(
            el(
                "div",
                el("p", found.verdict, class_=f"verdict {kind}"),
                el("p", measure, class_="muted"),
                arms(found.base, found.adapter, percents=found.measure == "accuracy"),
                class_="card",
            )
        )
    elif found is not None:
        parts.append(el("div", el("p", el("strong", found.status.capitalize()), ": ", found.reason), class_="card"))
    if view.preview is not None:
        sides = (("Prompt", view.preview.prompt), ("Before", view.preview.before), ("After", view.preview.after))
        quotes = [el("div", el("dt", name), el("dd", el("pre", text, class_="quote"))) for name, text in sides]
        parts.append(el("div", el("dl", quotes, class_="preview"), class_="card"))
    if not parts:
        return None
    return [el("h2", "Evaluation" if found else "Before and after"), el("div", parts, class_="pair")]


def rollouts(site: Site, view: RunView) -> Node:
    """The rollouts that were kept of one step."""
    found = view.rollouts
    if found.step is None or found.last is None:
        return [el("h2", "Rollouts"), el("div", el("p", "None were kept so far."), class_="card empty")]
    here = site.run(view.record.run_id)
    cards: list[Node] = [
        _problem(prompt, list(lines)) for prompt, lines in groupby(found.lines, key=lambda line: line.prompt)
    ]
    if not cards:
        cards = [el("div", el("p", f"None were kept of step {found.step}."), class_="card empty")]
    if found.left_out:
        cards.append(el("p", f"{found.left_out} more are in rollouts.jsonl.", class_="muted"))
    return [
        el("div", el("h2", f"Rollouts of step {found.step}"), _step_choice(here, view, found), class_="section-head"),
        cards,
    ]


def _step_choice(here: str, view: RunView, found: Rollouts) -> Safe:
    def to(step: int | None, text: str, label: str) -> Safe:
        if step is None or step == found.step:
            return el("span", text, class_="off", aria_hidden="true")
        return el("a", text, href=f"{here}?step={step}&log={view.log.process}#rollouts", aria_label=label)

    field = el("input", type="number", name="step", value=found.step, min=found.first, max=found.last)
    newest = el("a", "Newest", href=f"{here}?log={view.log.process}#rollouts")
    return el(
        "form",
        to(found.first, "⇤", "First step"),
        to(found.before, "←", "Step before"),
        el("label", "Step ", field),
        el("input", type="hidden", name="log", value=view.log.process),
        el("button", "Go", class_="button"),
        to(found.after, "→", "Step after"),
        newest,
        method="get",
        action=f"{here}#rollouts",
        class_="steps-nav",
    )


def _problem(prompt: str, lines: list[RolloutLine]) -> Safe:
    return el(
        "article",
        el("div", el("h3", "Prompt"), el("pre", prompt, class_="quote prompt"), class_="prompt-box"),
        el("div", [_answer(line) for line in lines], class_="answers"),
        class_="card problem",
    )


def _answer(line: RolloutLine) -> Safe:
    colour = "up" if line.advantage > 0 else ("down" if line.advantage < 0 else "even")
    parts = [el("span", f"{name} {number(value)}", class_="tag") for name, value in line.reward_parts.items()]
    version = NONE if line.policy_version is None else str(line.policy_version)
    return el(
        "div",
        el(
            "div",
            el("span", "reward ", el("strong", number(line.reward)), class_=f"reward-tag {colour}"),
            el("span", f"policy version {version}", class_="tag"),
            el("span", f"advantage {number(line.advantage)}", class_="tag"),
            el("span", f"{line.tokens} token{'' if line.tokens == 1 else 's'}", class_="tag"),
            el("span", line.finish_reason, class_="tag" if line.finish_reason != "length" else "tag warn")
            if line.finish_reason
            else None,
            parts,
            class_="tags",
        ),
        el("pre", line.completion, class_="quote") if line.completion else el("p", "(empty answer)", class_="muted"),
        class_="answer",
    )


def logs(site: Site, view: RunView, query: RunQuery) -> Node:
    """The end of one log."""
    here = site.run(view.record.run_id)
    step = f"&step={query.step}" if query.step is not None else ""
    tabs = [
        el(
            "a",
            title,
            el("small", size(view.log_sizes.get(name, 0))),
            href=f"{here}?log={name}{step}#logs",
            aria_current="page" if name == view.log.process else None,
        )
        for name, title in LOGS.items()
    ]
    whole = el("a", "Whole log", href=f"{here}/logs/{view.log.process}")
    body: Node = el("p", "Nothing was written.", class_="muted log-empty")
    if view.log.text:
        body = el("pre", view.log.text, class_="log", data_keep_end=True, tabindex=0, aria_label="End of the log")
    return [
        el("div", el("h2", "Logs"), whole, class_="section-head"),
        el("div", el("nav", tabs, class_="tabs", aria_label="Logs"), body, class_="card flush"),
    ]


def checkpoints(view: RunView) -> Node:
    """Finished ones, newest first, and the adapter that can be used."""
    if not view.checkpoints and not view.adapter_path:
        return None
    run_id = view.record.run_id
    use = None
    if view.adapter_path:
        use = el(
            "p",
            "Use it: ",
            el("code", f"hermes-rl serve {run_id}"),
            " or ",
            el("code", f"hermes-rl export {run_id}"),
            el("br"),
            el("span", "Adapter: ", class_="muted"),
            el("code", view.adapter_path),
        )
    rows = [
        [str(one.step), str(one.policy_version), size(one.size_bytes), moment(one.created_at), el("code", one.path)]
        for one in view.checkpoints
    ]
    listed = table(("Step", "Policy version", "Size", "Written", "Folder"), rows) if rows else None
    return [el("h2", "Checkpoints"), el("div", use, listed, class_="card")]


def events(view: RunView) -> Node:
    """Changes of state, newest first."""
    items = [
        el("li", clock(event.time), pill(event.status.value), el("span", event.reason, class_="quoted"))
        for event in view.events
    ]
    return [el("h2", "Events"), el("div", el("ol", items, class_="events"), class_="card")]


def configuration(view: RunView) -> Node:
    """All the run was told, secrets masked."""
    if not view.config:
        return None
    groups = [
        el(
            "div",
            el("h3", name),
            el("dl", [el("div", el("dt", key), el("dd", value)) for key, value in rows], class_="settings"),
        )
        for name, rows in view.config
    ]
    folder = el("p", el("span", "Folder: ", class_="muted"), el("code", view.folder))
    return el("details", el("summary", "Configuration"), folder, groups, class_="card more", id="configuration-details")


def last_steps(view: RunView) -> Safe:
    """The figures behind the curves."""
    curve = view.curve
    names = [name for name in _TABLE if curve.has(name)]
    first = max(0, len(curve) - _TABLE_STEPS)
    rows = [
        [f"{curve.steps[index]:,}", *(_cell(name, curve.values[name][index]) for name in names)]
        for index in reversed(range(first, len(curve)))
    ]
    return el("div", table(("Step", *(_TABLE[name] for name in names)), rows, class_="figures"), class_="card")


def _cell(name: str, value: float) -> str:
    return f"{value:.0f}" if name == "policy/version" and value == value else number(value)


def table(heads: Iterable[str], rows: Iterable[Sequence[Node]], class_: str = "") -> Safe:
    """One that scrolls by itself where it is wider than the page."""
    return el(
        "div",
        el(
            "table",
            el("thead", el("tr", [el("th", head, scope="col") for head in heads])),
            el("tbody", [el("tr", [el("td", cell) for cell in row]) for row in rows]),
            class_=class_ or None,
        ),
        class_="wide",
    )

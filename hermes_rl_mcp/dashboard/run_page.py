"""One run: state, what needs attention, curves, verdict, rollouts, logs."""

from __future__ import annotations

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.dashboard import curves, run_parts
from hermes_rl_mcp.dashboard.chart import bar, figure
from hermes_rl_mcp.dashboard.html import Node, Safe, el
from hermes_rl_mcp.dashboard.layout import Site, crumbs, live, page, pill
from hermes_rl_mcp.dashboard.views import RunQuery, RunView
from hermes_rl_mcp.dashboard.words import NONE, moment, number, percent
from hermes_rl_mcp.quantities import duration, size

_REFRESH_S, _ENDED_REFRESH_S = 2.0, 20.0


def run_page(site: Site, view: RunView, query: RunQuery, proof: str) -> str:
    """``proof`` is what the form that stops the run carries."""
    record, status = view.record, view.status
    ended = record.status.terminal
    step = status.metrics.step or 0
    title = f"{step}/{record.total_steps} {status.status} · {record.run_id} · Hermes RL"
    return page(
        site,
        title,
        crumbs(el("a", "Runs", href=site.base), el("span", record.run_id)),
        live("head", _head(site, view, proof)),
        live("attention", _attention(view)),
        _sections(view),
        live("curves", _curves(view)),
        live("evaluation", run_parts.verdict(view)),
        live("rollouts", run_parts.rollouts(site, view)),
        live("logs", run_parts.logs(site, view, query)),
        live("checkpoints", run_parts.checkpoints(view)),
        live("events", run_parts.events(view)),
        live("configuration", run_parts.configuration(view)),
        refresh_s=_ENDED_REFRESH_S if ended else _REFRESH_S,
    )


def _sections(view: RunView) -> Safe:
    parts = [
        ("curves", "Curves", len(view.curve) > 0),
        ("evaluation", "Evaluation", view.held_out is not None or view.preview is not None),
        ("rollouts", "Rollouts", True),
        ("logs", "Logs", True),
        ("checkpoints", "Checkpoints", bool(view.checkpoints)),
        ("events", "Events", True),
        ("configuration", "Configuration", bool(view.config)),
    ]
    links = [el("a", name, href=f"#{key}") for key, name, there in parts if there]
    return el("nav", links, id="sections", data_live=True, class_="sections", aria_label="Parts of this page")


def _head(site: Site, view: RunView, proof: str) -> Node:
    record, status = view.record, view.status
    return [
        el(
            "div",
            el(
                "div",
                el("h1", el("span", record.run_id, class_="mono"), pill(status.status)),
                el("p", el("strong", record.environment), " on ", el("strong", record.base_model), class_="muted"),
            ),
            _stop(site, view, proof),
            class_="page-head",
        ),
        el("div", _progress(view), class_="card"),
    ]


def _stop(site: Site, view: RunView, proof: str) -> Safe | None:
    if view.record.status.terminal or not site.may_stop or view.status.status == "stopping":
        return None
    run_id = view.record.run_id
    return el(
        "details",
        el("summary", "Stop run", class_="button danger"),
        el(
            "div",
            el("p", "The environment ends first, then the trainer, which writes a checkpoint."),
            el("p", "A stopped run can be continued later."),
            el(
                "form",
                el("input", type="hidden", name="proof", value=proof),
                el("button", f"Stop {run_id} now", class_="button danger solid"),
                method="post",
                action=f"{site.run(run_id)}/stop",
            ),
            class_="sheet",
        ),
        class_="stop",
        id="stop",
    )


def _progress(view: RunView) -> Node:
    record, status = view.record, view.status
    step = status.metrics.step or 0
    doing = status.detail if status.detail != status.waiting else ""
    left = f"{duration(status.eta_seconds)} left" if status.eta_seconds is not None else ""
    queued = f"position {record.queue_position} in the queue" if record.queue_position else ""
    line = [part for part in (doing, queued, left) if part]
    return [
        el(
            "div",
            el("span", el("strong", f"{step:,}"), f" of {record.total_steps:,} steps"),
            el("span", " · ".join(line), class_="muted"),
            class_="progress-line",
        ),
        bar(step / record.total_steps if record.total_steps else 0.0),
        el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in _facts(view)], class_="facts"),
    ]


def _facts(view: RunView) -> list[tuple[str, Node]]:
    record, status = view.record, view.status
    version = status.latest.get("policy/version")
    reward = number(status.metrics.reward_mean)
    first = next((one for one in view.curve.values.get("reward/mean", ()) if one == one), None)
    facts: list[tuple[str, Node]] = [
        ("Mean reward", [el("strong", reward), f" from {number(first)}" if first is not None else None]),
        ("Correct", percent(status.metrics.percent_correct)),
        ("Policy version", str(version) if isinstance(version, int) else NONE),
        ("Running", duration(status.running_time_minutes * 60)),
        ("Started", moment(record.created_at)),
        ("Ended", moment(record.ended_at)) if record.ended_at else ("Device", record.device),
    ]
    if view.started_by:
        facts.append(("Started by", view.started_by))
    if record.peak_memory_bytes:
        facts.append(("Peak memory", size(record.peak_memory_bytes)))
    if record.resumed_from:
        facts.append(("Continues", f"{record.resumed_from} after step {record.resumed_step}"))
    facts.append(("Processes", _processes(status.processes)))
    if status.wandb_url and status.wandb_url.startswith("https://"):
        facts.append(("Weights & Biases", el("a", "open", href=status.wandb_url, rel="noreferrer noopener")))
    if status.sends_to:
        facts.append(("Sends to", ", ".join(status.sends_to)))
    return facts


def _processes(states: dict[str, str]) -> Node:
    names = {"api": "rollout API", "trainer": "trainer", "env": "environment"}
    said = [f"{names.get(name, name)} {state}" for name, state in states.items()]
    return [el("span", one, class_="process") for one in said]


def _attention(view: RunView) -> Node:
    record, status = view.record, view.status
    found: list[Node] = []
    if status.error:
        found.append(_notice("bad", f"This run {_ended_words(status.status)}", status.error, status.hint or ""))
    if status.stop_unconfirmed:
        pids = ", ".join(map(str, record.leftover_pids))
        found.append(_notice("bad", "Processes would not go", f"The run has ended, but these go on: {pids}.", ""))
    found += [_flag(flag) for flag in status.flags]
    stalled = any(flag.name == "stalled" for flag in status.flags)
    if status.stalled and not stalled:
        found.append(_notice("bad", "Stalled", record.stalled_reason or "Nothing moves.", ""))
    elif status.waiting and not stalled and not record.status.terminal:
        found.append(el("p", "Now: ", status.waiting, class_="muted waiting"))
    if status.wandb_error:
        found.append(_notice("warn", "Weights & Biases", status.wandb_error, "Training is not affected."))
    return found


def _ended_words(status: str) -> str:
    return {"failed": "failed", "interrupted": "was interrupted"}.get(status, f"is {status}")


def _flag(flag: Flag) -> Safe:
    since = f" since step {flag.since_step}" if flag.since_step is not None else ""
    kind = "bad" if flag.severity == "error" else "warn"
    setting: Node = [" Setting: ", el("code", flag.setting), "."] if flag.setting else None
    return _notice(kind, f"{flag.name.replace('_', ' ').capitalize()}{since}", flag.evidence, [flag.advice, setting])


def _notice(kind: str, title: str, text: str, advice: Node) -> Safe:
    return el(
        "div",
        el("strong", title),
        el("p", text, class_="quoted"),
        el("p", advice, class_="advice") if advice else None,
        class_=f"notice {kind}",
        role="status",
    )


def _curves(view: RunView) -> Node:
    if not len(view.curve):
        waiting = "No step was taken." if view.record.status.terminal else "Curves appear with the first step."
        return el("div", el("p", waiting), class_="card empty")
    mark = view.record.resumed_step
    main = curves.of_one(curves.MAIN, view.curve)
    further = [*curves.parts_of_reward(view.curve), *curves.of_one(curves.FURTHER, view.curve)]
    first = [figure(chart, key=str(index), mark=mark) for index, chart in enumerate(main)]
    more = [figure(chart, key=f"more-{index}", mark=mark) for index, chart in enumerate(further)]
    return [
        el("h2", "Curves"),
        el("div", first, class_="charts"),
        el(
            "details",
            el("summary", "More curves and the last steps as a table"),
            el("div", more, class_="charts"),
            run_parts.last_steps(view),
            id="more-curves",
            class_="more",
        ),
    ]

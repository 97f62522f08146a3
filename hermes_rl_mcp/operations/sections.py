"""Parts of a run, page by page: what tools include on request, resources serve and the dashboard shows.

Every page keeps to a budget of characters, so that an answer with several of them stays readable for a model. What is
left out is never silent: ``truncated`` and ``next_offset`` say how to go on. Known secrets are masked here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import anyio.to_thread
import yaml
from pydantic import BaseModel, ValidationError

from hermes_rl_mcp.contracts.records import RolloutLine
from hermes_rl_mcp.contracts.runs import Event
from hermes_rl_mcp.contracts.sections import (
    CheckpointInfo,
    CheckpointsPage,
    Diagnosis,
    EventsPage,
    LogPage,
    MetricsPage,
    Page,
    RolloutsPage,
    SectionName,
    SectionQuery,
    Sections,
    TextPage,
)
from hermes_rl_mcp.errors import InvalidValueError, NotFoundError
from hermes_rl_mcp.files import read_tail
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.fitting import rounded, spread
from hermes_rl_mcp.operations.log_window import MAX_WINDOW_BYTES, log_window
from hermes_rl_mcp.operations.reading import RunReader, known_secrets
from hermes_rl_mcp.operations.run_files import read_config
from hermes_rl_mcp.paths import PROCESS_LOGS
from hermes_rl_mcp.redact import redact, redact_text
from hermes_rl_mcp.untrusted import shown, shown_values

BUDGET_CHARS = 10_500
"""JSON of all sections of one answer: under 8,000 tokens together with what the answer says besides."""
_ROLLOUT_CHARS = 1_200
"""Of one prompt or completion in a page; ``rollouts.jsonl`` has the whole."""
_ROLLOUT_REST_CHARS = 400
"""What a row has besides, about."""
_NAMES = get_args(SectionName)
_NAMES_BY_SIZE: tuple[SectionName, ...] = (
    "plot",
    "checkpoints",
    "events",
    "diagnosis",
    "config",
    "log",
    "rollouts",
    "metrics",
)
KEY_METRICS = (
    *("step", "reward/mean", "reward/std", "train/loss", "train/percent_correct", "eval/percent_correct"),
    *("rollouts/length_mean", "rollouts/truncated_fraction"),
)
"""What is shown of many steps where few would fit with all their metrics."""
_FEW_ROWS = 5
_DEFAULT_ROWS = {"metrics": 20, "rollouts": 8, "checkpoints": 20, "events": 30}
_DEFAULT_LOG_BYTES = 4_096
_MAX_LOG_LINE_CHARS = (600, 300, 150, 80)
"""Of lines in a diagnosis: the longest that let it fit."""
_MAX_FIGURES, _MAX_NAME_CHARS = 150, 60
"""Of a step: a line of metrics has about 40, and nobody of us wrote the names of a reward's parts."""
_LAST_LINES = 5
_LAST_BYTES = 2_048

Row = TypeVar("Row", bound=BaseModel)


async def sections(
    context: Context, reader: RunReader, include: Sequence[SectionName], query: SectionQuery
) -> Sections:
    """Every section named, each once. The budget is shared out evenly among them, and what a small one leaves goes to
    those that can be long. Raises InvalidValueError."""
    for name in include:
        if name not in _NAMES:
            raise InvalidValueError(
                f"include: there is no part '{str(name)[:50]}' of a run.",
                hint="Name some of valid_values.",
                details={"valid_values": list(_NAMES)},
            )
    wanted = [name for name in _NAMES_BY_SIZE if name in include]
    left = BUDGET_CHARS
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for place, name in enumerate(wanted):
        share = left // (len(wanted) - place)
        if name == "plot":
            from hermes_rl_mcp.operations.plots import plot_info  # a child process draws it

            found[name] = await plot_info(context, reader)
        else:
            try:
                found[name] = await anyio.to_thread.run_sync(_READERS[name], context, reader, query, share)
            except NotFoundError as error:  # the other parts are still worth an answer
                missing[name] = shown(error.message, _MAX_LOG_LINE_CHARS[0])
        left -= _size(found[name].model_dump(mode="json")) if name in found else len(missing[name])
    return Sections.model_validate({**found, "missing": missing})


def pages(found: Sections | None) -> list[Page]:
    """The parts that have further pages, as far as they were included."""
    if found is None:
        return []
    return [part for name in type(found).model_fields if isinstance(part := getattr(found, name), Page)]


def truncated(found: Sections | None) -> bool:
    """Whether any part goes on after its page."""
    return any(page.truncated for page in pages(found))


def next_offset(found: Sections | None) -> int | None:
    """Where the one part that goes on does; None if several do, each at its own."""
    further = [page.next_offset for page in pages(found) if page.truncated]
    return further[0] if len(further) == 1 else None


def metrics_page(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> MetricsPage:
    """Steps from ``offset`` on; without one ``limit`` steps spread evenly over the run, or as many as fit."""
    lines = reader.metrics()
    limit = query.limit or _DEFAULT_ROWS["metrics"]
    if query.offset >= 0:
        rows = _fitting([_figures(line) for line in lines[query.offset : query.offset + limit]], budget)
        return MetricsPage(rows=rows, spread=False, **_place(len(lines), query.offset, len(rows)))
    names: Sequence[str] = ()
    while True:
        rows = [_figures(lines[i], names) for i in spread(len(lines), limit)]
        if limit == 1 or _size(rows) <= budget:
            return MetricsPage(rows=rows, spread=True, total=len(lines), offset=0, key_metrics_only=bool(names))
        fewer = max(1, min(limit - 1, limit * budget // _size(rows)))
        if fewer < _FEW_ROWS and not names:
            names = KEY_METRICS
        else:
            limit = fewer


def rollouts_page(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> RolloutsPage:
    """Scored rollouts, oldest first; without an offset the newest."""
    found = [line for line in reader.rollouts() if query.step is None or line.get("step") == query.step]
    first, window = _window(found, query, _DEFAULT_ROWS["rollouts"])
    secrets = known_secrets(context, reader.record.run_id)
    rows = _fitting(
        [_cut_rollout(one, secrets, budget) for one in _parsed(RolloutLine, window)], budget, newest=query.offset < 0
    )
    if query.offset < 0:
        first = len(found) - len(rows)
    return RolloutsPage(rows=[RolloutLine.model_validate(row) for row in rows], **_place(len(found), first, len(rows)))


def events_page(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> EventsPage:
    """Changes of state, oldest first; without an offset the newest."""
    found = reader.events()
    first, window = _window(found, query, _DEFAULT_ROWS["events"])
    secrets = known_secrets(context, reader.record.run_id)
    masked = [shown_values(redact(one.model_dump(mode="json"), secrets)) for one in _parsed(Event, window)]
    rows = _fitting(masked, budget, newest=query.offset < 0)
    if query.offset < 0:
        first = len(found) - len(rows)
    return EventsPage(rows=[Event.model_validate(row) for row in rows], **_place(len(found), first, len(rows)))


def checkpoints_page(
    context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS
) -> CheckpointsPage:
    """Finished checkpoints by step; without an offset the newest."""
    found = context.runs.checkpoints(reader.record.run_id)
    first, window = _window(found, query, _DEFAULT_ROWS["checkpoints"])
    rows = []
    for path, marker in window:
        try:
            size = sum((path / name).stat().st_size for name in marker.files)
        except OSError:  # an old one goes when a new one is complete
            continue
        rows.append(
            CheckpointInfo(
                step=marker.step,
                path=str(path),
                policy_version=marker.policy_version,
                created_at=marker.created_at,
                size_bytes=size,
            )
        )
    return CheckpointsPage(rows=rows, **_place(len(found), first, len(window)))


def log_page(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> LogPage:
    """A window in bytes of one log; without an offset its end."""
    limit = query.limit or _DEFAULT_LOG_BYTES
    if limit > MAX_WINDOW_BYTES:
        raise InvalidValueError(
            f"limit {limit}: a log is read in windows of at most {MAX_WINDOW_BYTES} bytes.",
            hint="Ask for fewer; next_offset leads to the rest.",
        )
    run_id = reader.record.run_id
    path = context.home.log(query.process, run_id)
    secrets, limit = known_secrets(context, run_id), min(limit, budget)
    while True:
        window = log_window(path, query.offset, limit, secrets)
        text = shown(redact_text(window.text), MAX_WINDOW_BYTES)
        if (weight := _weight(text)) <= budget or limit == 1:
            return LogPage(process=query.process, text=text, **_place(window.size, window.offset, window.length))
        limit = max(1, limit * budget // weight - 1)  # escapes are longer than what they stand for


def diagnosis(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> Diagnosis:
    """Flags, who waits for whom, and the last lines of every log."""
    record = reader.record
    secrets = known_secrets(context, record.run_id)
    tails = {name: read_tail(context.home.log(name, record.run_id), _LAST_BYTES) for name in PROCESS_LOGS}
    lines = {name: tail.splitlines()[-_LAST_LINES:] for name, tail in tails.items() if tail}
    found = Diagnosis(
        flags=reader.flags(),
        waiting=reader.waiting(),
        stalled=record.stalled and not record.status.terminal,
        stalled_reason=record.stalled_reason,
        error=record.error,
        hint=record.hint,
        last_log_lines={name: [redact_text(line, secrets) for line in some] for name, some in lines.items()},
    )
    masked = redact(found.model_dump(mode="json"), secrets)
    for chars in _MAX_LOG_LINE_CHARS:
        cut = shown_values(shown_values(masked), chars)
        if _size(cut) <= budget:
            break
    return Diagnosis.model_validate(cut)


def config_page(context: Context, reader: RunReader, query: SectionQuery, budget: int = BUDGET_CHARS) -> TextPage:
    """What the run was told, as YAML; before it has ports, what was asked for. Raises NotFoundError."""
    text = yaml.safe_dump(read_config(context, reader), sort_keys=False, allow_unicode=True)
    return text_page(text, query.offset, query.limit, budget)


def text_page(text: str, offset: int, limit: int = 0, budget: int = BUDGET_CHARS) -> TextPage:
    """Characters from ``offset`` on, at most ``limit`` (0 = as many as fit), to the end of a line where there is one.

    Escapes count as they are shown, so a page may hold fewer characters of a file full of them.
    """
    begin = min(max(0, offset), len(text))
    most = min(limit, budget) if limit > 0 else budget
    while True:
        part = text[begin : begin + most]
        if begin + len(part) < len(text) and (line_end := part.rfind("\n")) > 0:
            part = part[: line_end + 1]
        escaped = shown(part, len(part))
        if (weight := _weight(escaped)) <= budget or most == 1:
            return TextPage(text=escaped, **_place(len(text), begin, len(part)))
        most = max(1, most * budget // weight - 1)


_READERS = {
    "metrics": metrics_page,
    "rollouts": rollouts_page,
    "log": log_page,
    "checkpoints": checkpoints_page,
    "diagnosis": diagnosis,
    "events": events_page,
    "config": config_page,
}


def _window(found: Sequence[Any], query: SectionQuery, default: int) -> tuple[int, Sequence[Any]]:
    limit = query.limit or default
    first = max(0, len(found) - limit) if query.offset < 0 else query.offset
    return first, found[first : first + limit]


def _place(total: int, offset: int, count: int) -> dict[str, Any]:
    more = offset + count < total and count > 0
    return {"total": total, "offset": offset, "truncated": more, "next_offset": offset + count if more else None}


def _fitting(rows: Sequence[Any], budget: int, *, newest: bool = False) -> list[Any]:
    """As many as the budget holds, but one at least: from the beginning, or from the end."""
    kept: list[Any] = []
    left = budget
    for row in reversed(rows) if newest else rows:
        left -= _size(row)
        if left < 0 and kept:
            break
        kept.append(row)
    return kept[::-1] if newest else kept


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str))


def _weight(text: str) -> int:
    """Its size as JSON. Escapes count more: of words a token is several characters, of these it is hardly one."""
    return _size(text) + 3 * text.count("\\")


def _parsed(model: type[Row], lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Lines of a later version, or damaged ones, are left out."""
    found = []
    for line in lines:
        try:
            found.append(model.model_validate(line))
        except ValidationError:
            continue
    return found


def _cut_rollout(line: RolloutLine, secrets: Sequence[str], budget: int) -> dict[str, Any]:
    chars = max(80, min(_ROLLOUT_CHARS, (budget - _ROLLOUT_REST_CHARS) // 2))
    escaped = shown_values(redact(rounded(line.model_dump(mode="json")), list(secrets)), _ROLLOUT_CHARS)
    masked: dict[str, Any] = shown_values(escaped, chars)  # as they are shown, escapes are longer
    return masked


def _figures(line: dict[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    kept = [(name, value) for name, value in line.items() if not names or name in names]
    found: dict[str, Any] = shown_values(rounded(dict(kept[:_MAX_FIGURES])), _MAX_NAME_CHARS)
    return found

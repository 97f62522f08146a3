"""rl_list_runs: which runs there are, found by what is on their records, and several of them side by side.

Only the runs on the page are read any further than their record, so a list of few costs little however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from hermes_rl_mcp.contracts.results import ListRuns, RunSummary
from hermes_rl_mcp.contracts.runs import UNKNOWN, UNREADABLE, RunRecord, RunStatus
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.fitting import PAGE_CHARS, size, sliced
from hermes_rl_mcp.operations.side_by_side import comparison
from hermes_rl_mcp.operations.training import named, summary
from hermes_rl_mcp.runs.store import Unreadable

DEFAULT_LIMIT = 50
ACTIVE, ENDED = "active", "ended"
STATUSES = (ACTIVE, ENDED, *(status.value for status in RunStatus), UNREADABLE, UNKNOWN)


@dataclass(frozen=True)
class RunFilter:
    """Empty = everything. All texts without regard to case."""

    environment: str = ""
    status: str = ""
    """One of STATUSES."""
    model: str = ""
    """Part of the base model's name."""
    text: str = ""
    """Part of the id, of the W&B name, or of what the run says of itself."""

    def matches(self, run: RunRecord | Unreadable) -> bool:
        if isinstance(run, Unreadable):
            rest = self.environment or self.model
            return not rest and self._status(run.label, False) and _in(self.text, run.run_id, run.reason)
        said = (run.run_id, run.wandb_run_name, run.environment, run.base_model, run.error or "", run.detail)
        return (
            self.environment.lower() in ("", run.environment.lower())
            and self._status(run.status.value, run.status.terminal)
            and _in(self.model, run.base_model)
            and _in(self.text, *said)
        )

    def _status(self, status: str, terminal: bool) -> bool:
        if self.status in (ACTIVE, ENDED):
            return status in set(RunStatus) and terminal is (self.status == ENDED)
        return self.status in ("", status)


async def list_runs(
    context: Context,
    limit: int = DEFAULT_LIMIT,
    offset: int = 0,
    wanted: RunFilter = RunFilter(),
    compare: Sequence[str] = (),
    page_chars: int = PAGE_CHARS,
) -> ListRuns:
    """Newest first, unreadable ones included; with ``compare`` those runs and how they differ.

    Raises InvalidValueError, and for a comparison UnknownRunError or UnreadableRunError.
    """
    if wanted.status and wanted.status not in STATUSES:
        raise InvalidValueError(
            f"status = '{wanted.status[:50]}' is no state of a run.",
            hint="Call rl_list_runs with one of valid_values.",
            details={"valid_values": list(STATUSES)},
        )
    if compare:
        ids = list(dict.fromkeys([await named(context, run_id) for run_id in compare]))
        found = await comparison(context, ids, page_chars)
        records = [context.runs.get(run_id) for run_id in ids]
        rows = await anyio.to_thread.run_sync(lambda: [summary(context, record) for record in records])
        return ListRuns(runs=rows, count=len(rows), comparison=found.comparison, truncated=found.cut)
    return await anyio.to_thread.run_sync(_page, context, limit, offset, wanted, page_chars)


def _page(context: Context, limit: int, offset: int, wanted: RunFilter, page_chars: int) -> ListRuns:
    found = [run for run in context.runs.list() if wanted.matches(run)]
    begin = min(max(0, offset), len(found))
    rows = [_row(context, run) for run in found[begin : begin + limit]]
    page = sliced([size(row.model_dump(mode="json")) for row in rows], 0, limit, page_chars)
    end = begin + page.last
    more = end < len(found)
    return ListRuns(runs=rows[: page.last], count=len(found), truncated=more, next_offset=end if more else None)


def _row(context: Context, run: RunRecord | Unreadable) -> RunSummary:
    if isinstance(run, RunRecord):
        row = summary(context, run)
        cut = row.note is not None and len(row.note) > _NOTE_CHARS
        return row.model_copy(update={"note": f"{row.note[:_NOTE_CHARS]}…"}) if cut and row.note else row
    return RunSummary(run_id=run.run_id, environment="", status=run.label, wandb_run_name="", note=run.reason)


_NOTE_CHARS = 300
"""Of what a run says of itself in a list; rl_check_status has all of it."""


def _in(part: str, *texts: str) -> bool:
    return not part or any(part.lower() in text.lower() for text in texts)

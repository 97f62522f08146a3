"""Which resources there are now, for clients that list rather than fill templates, page by page.

Newest runs first and with all their parts; of older ones the state alone, since a list goes into a conversation.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio.to_thread
import mcp.types as t
from mcp.shared.exceptions import MCPError

from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.environments import catalog
from hermes_rl_mcp.server.resources import table
from hermes_rl_mcp.server.resources.kinds import Kind
from hermes_rl_mcp.untrusted import shown

PAGE = 50
WHOLE_RUNS = 5
"""Listed with all their parts, besides those that go on."""
LISTED_RUNS = 500
_TITLE_CHARS = 200
_REMEMBERED = 12
"""Items in a cursor: more than one run has, and all parts of a run but one go at once."""
_RUN_KINDS = (table.METRICS, table.PLOT, table.ROLLOUTS, table.CHECKPOINTS, table.EVENTS, table.CONFIG)
_LOGS = ("trainer", "env", "api")

Item = TypeVar("Item")


async def listed(context: Context) -> list[t.Resource]:
    """Environments first, then local data sets, then runs."""
    found: list[t.Resource] = []
    for info in (await catalog(context)).environments:
        title = f"Source of environment {info.name}"
        found.append(_resource(table.SOURCE, f"{info.stem}.py", title, name=info.name))
        found.append(
            _resource(table.SCHEMA, f"{info.stem}-schema", f"Settings of environment {info.name}", name=info.name)
        )
    from hermes_rl_mcp.operations.datasets import available  # the server must start fast

    names = await anyio.to_thread.run_sync(available, context)
    found += [_resource(table.DATASET, name, f"Data set {name}", id=name) for name in names]
    runs = await anyio.to_thread.run_sync(context.runs.list)
    readable = [run for run in runs if isinstance(run, RunRecord)][:LISTED_RUNS]
    for place, run in enumerate(readable):
        found += _of_run(run, whole=place < WHOLE_RUNS or not run.status.terminal)
    return found


def _of_run(run: RunRecord, *, whole: bool) -> list[t.Resource]:
    which = f"of run {run.run_id} ({run.environment}, {run.created_at[:16]})"
    found = [_resource(table.STATE, f"{run.run_id}-state", f"State {which}", run_id=run.run_id)]
    if not whole:
        return found
    for kind in _RUN_KINDS:
        part = kind.name.removeprefix("run-")
        found.append(_resource(kind, f"{run.run_id}-{part}", f"{part.title()} {which}", run_id=run.run_id))
    for process in _LOGS:
        title = f"Log of {process} {which}"
        found.append(_resource(table.LOG, f"{run.run_id}-{process}.log", title, run_id=run.run_id, process=process))
    return found


def _resource(kind: Kind, name: str, title: str, /, **parameters: str) -> t.Resource:
    return t.Resource(uri=kind.uri(**parameters), name=name, title=shown(title, _TITLE_CHARS), mime_type=kind.mime_type)


def page(
    items: Sequence[Item], cursor: str | None, key: Callable[[Item], str], size: int = PAGE
) -> tuple[list[Item], str | None]:
    """The items after ``cursor``, and the cursor of the page after them. Raises MCPError for a cursor of nobody's.

    A cursor names the last items shown, so that what is new at the front of the list, or went from it, moves nothing;
    where all of them are gone, their place counts.
    """
    first = _after(items, cursor, key) if cursor else 0
    shown_now = list(items[first : first + size])
    end = first + len(shown_now)
    more = shown_now and end < len(items)
    return shown_now, _cursor(end, [key(item) for item in shown_now[-_REMEMBERED:]]) if more else None


def _cursor(place: int, last: Sequence[str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([place, *map(_short, last)]).encode()).decode()


def _after(items: Sequence[Item], cursor: str, key: Callable[[Item], str]) -> int:
    try:
        place, *last = json.loads(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True))
        if not all(isinstance(number, int) and number >= 0 for number in (place, *last)):
            raise ValueError
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise MCPError(
            code=t.INVALID_PARAMS, message="Invalid cursor. Begin without one; it comes from nextCursor of a list."
        ) from None
    places = {_short(key(item)): index for index, item in enumerate(items)}
    found = next((places[one] for one in reversed(last) if one in places), None)
    return place if found is None else found + 1


def _short(key: str) -> int:
    return zlib.crc32(key.encode())

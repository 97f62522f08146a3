"""todo: the list of things to do that a model keeps for itself during one task."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.interfaces import CallContext, Tool
from hermes_rl_mcp.agent.tools.schema import arguments, choice, flag, text
from hermes_rl_mcp.errors import InvalidValueError

_KEY = "todo"
STATUSES = ("pending", "in_progress", "completed", "cancelled")
MAX_ITEMS = 200


def todo(context: CallContext, args: dict[str, Any]) -> JsonValue:
    """``{todos, summary}``. Without ``todos`` it reads."""
    known: list[dict[str, str]] = context.state.get(_KEY, [])
    given = args.get("todos")
    if given is not None:
        known = _merged(known, given) if args.get("merge") else _merged([], given)
        context.state[_KEY] = known
    counts = {status: sum(one["status"] == status for one in known) for status in STATUSES}
    return {"todos": [dict(one) for one in known], "summary": {"total": len(known), **counts}}


def _merged(known: list[dict[str, str]], given: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Items of the same id take over what is given; new ones follow. An id that stands twice counts once, the last."""
    items = {one["id"]: dict(one) for one in known}
    for one in given:
        key = str(one["id"]).strip()
        if not key:
            raise InvalidValueError("A todo has an empty id.", hint="Give each todo an id of its own, such as '1'.")
        item = items.setdefault(key, {"id": key, "content": "", "status": "pending"})
        item.update({name: one[name] for name in ("content", "status") if name in one})
    if empty := [key for key, item in items.items() if not item["content"].strip()]:
        raise InvalidValueError(
            f"The todo {empty[0]!r} has no content.", hint="Say in 'content' what is to be done; a new id needs it."
        )
    if len(items) > MAX_ITEMS:
        raise InvalidValueError(f"{len(items)} todos are too many.", hint=f"Keep at most {MAX_ITEMS}.")
    return list(items.values())


_ITEM = arguments(
    ("id",),
    id=text("A short id of its own"),
    content=text("What is to be done; needed for a new id"),
    status=choice("How far it is", *STATUSES),
)
TOOLS = (
    Tool(
        "todo",
        "todo",
        "Your list of things to do in this task. Without arguments it shows the list. Use it for work of three steps "
        "or more: write the steps down in order, keep one of them in_progress, and mark each as completed at once.",
        arguments(
            (),
            todos={"type": "array", "items": _ITEM, "description": "Items to write; leave it out to read the list"},
            merge=flag("true: change the items with these ids and add new ones. false: replace the whole list."),
        ),
        todo,
    ),
)

"""What the handlers of all tools share: how a tool is described, how long it may take, progress, and pictures."""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import anyio
import mcp.types as t
from mcp.server.mcpserver import Context

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.context import MAX_WAIT_S, Progress
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server.tool_texts import TEXTS, icon

_NOTE_CHARS = 200
"""Of a progress note; clients cut what is longer."""
_ANSWER_S = 0.5
"""Kept for sending the answer."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def described(
    name: str,
    *,
    read_only: bool = False,
    destructive: bool = False,
    idempotent: bool = False,
    open_world: bool = False,
) -> dict[str, Any]:
    """Arguments of the SDK's ``tool`` decorator. What the tool answers is published by ``tools.register``."""
    text = TEXTS[name]
    return {
        "name": name,
        "title": text.title,
        "description": text.description,
        "structured_output": False,
        "icons": [t.Icon(src=icon(text.icon), mime_type="image/svg+xml")],
        "annotations": t.ToolAnnotations(
            read_only_hint=read_only,
            destructive_hint=destructive,
            idempotent_hint=idempotent or read_only,
            open_world_hint=open_world,
        ),
    }


def timely(tool: Callable[Arguments, Awaitable[Answer]]) -> Callable[Arguments, Awaitable[Answer]]:
    """``tool`` with an end: clients give up on a call after a minute, and a model then knows nothing."""

    @functools.wraps(tool)
    async def bounded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        with anyio.move_on_after(MAX_WAIT_S):
            return await tool(*args, **kwargs)
        raise HermesRLError(
            f"This call was ended after {MAX_WAIT_S:g} s: the machine or the environment is too slow for it.",
            hint="Call it again. If it was rl_start_training, first see with rl_list_runs if it started.",
        )

    return bounded


def progress(ctx: Context[Any, Any]) -> Progress:
    """The protocol wants each note's number above the last, so notes are counted and the figures go into the text."""
    count = 0

    async def report(done: float, total: float | None, message: str) -> None:
        nonlocal count
        count += 1
        of_total = f"{done:g}/{total:g} " if total else ""
        await ctx.report_progress(count, message=f"{of_total}{message}"[:_NOTE_CHARS])

    return report


class Picture(NamedTuple):
    """What was drawn, or why there is nothing; both None if nothing was asked for."""

    image: t.ImageContent | None = None
    error: str | None = None


async def picture(operations: Operations, run_ids: Sequence[str], began: float) -> Picture:
    """The curves of these runs, within what is left of a call that began then (monotonic seconds)."""
    if not run_ids:
        return Picture()
    left_s = began + MAX_WAIT_S - _ANSWER_S - time.monotonic()
    try:
        with anyio.fail_after(max(left_s, 0.0)):
            drawn = await operations.plot(run_ids)
    except HermesRLError as error:
        return Picture(error=str(error))
    except TimeoutError:
        return Picture(error="The plot could not be drawn in time. Call again without wait_seconds.")
    return Picture(t.ImageContent(data=base64.b64encode(drawn).decode(), mime_type="image/png"))

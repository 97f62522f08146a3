"""One tool call carried out: the text the model reads, and whether it failed. Used in the loop and at reward time.

Invariant: whatever the model wrote and whatever the tool does, the answer is text for the model; only a cancelled
rollout raises. A secret of the operator's settings is in no answer.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.agent.arguments import prepared
from hermes_rl_mcp.agent.interfaces import CallContext, Tool, Toolbox
from hermes_rl_mcp.agent.pool import ToolPool
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.redact import MASK, secret_values, spellings

log = logging.getLogger(__name__)

SLOW_S = 30.0
NOT_IN_ROLLOUTS = ("memory", "session_search", "delegate_task", "clarify")
"""Tools of the original that need a person or a past."""
_NAMES_SHOWN = 60


@dataclass(frozen=True)
class Answer:
    """``error`` is None for a call that worked; a command's exit code above 0 is no failure of the call."""

    text: str
    error: str | None = None


async def answer(
    name: str,
    arguments: str,
    *,
    toolbox: Toolbox,
    allowed: Collection[str],
    context: CallContext,
    pool: ToolPool,
    timeout_s: float,
) -> Answer:
    """``arguments`` is JSON text as the model wrote it; nothing at all means no arguments."""
    tool = toolbox.get(name) if name in allowed else None
    if tool is None:
        return _absent(name, allowed)
    try:
        values = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return _failed(f"Invalid JSON in the arguments of {name}: {error}. Please retry with valid JSON.")
    if not isinstance(values, dict):
        return _failed(f"The arguments of {name} are a JSON {type(values).__name__}. Please retry with a JSON object.")
    begun = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            result = await called(tool, values, context, pool)
    except TimeoutError:
        return _failed(f"{name} did not end within {timeout_s:g} s.")
    except Exception as error:  # noqa: BLE001 - a rollout's boundary: the model reads what went wrong
        return _explained(error, name, context)
    finally:
        if (spent_s := time.monotonic() - begun) > SLOW_S:
            log.info("tool %s took %.0f s", name, spent_s)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return Answer(_masked(text, context), _error_in(result))


def answer_json(name: str, arguments: Mapping[str, Any], *, tools: Mapping[str, Tool], context: CallContext) -> str:
    """The same for code instead of a model: blocks, so not for an event loop's thread, and gives JSON text always, of
    the result or of ``{"error": sentence}``."""
    tool = tools.get(name)
    if tool is None:
        return _absent(name, tools).text
    if reason := tool.missing(context.settings):
        return _failed(f"{name} cannot be had here: {reason}").text
    try:
        result = call_tool(tool, arguments, context)
    except Exception as error:  # noqa: BLE001 - a rollout's boundary: the caller reads what went wrong
        return _explained(error, name, context).text
    return _masked(json.dumps(result, ensure_ascii=False), context)


async def called(tool: Tool, values: dict[str, Any], context: CallContext, pool: ToolPool) -> JsonValue:
    """A handler that blocks runs in the pool. Raises what the tool raises."""
    fitting = prepared(tool.name, tool.parameters, values)
    if inspect.iscoroutinefunction(tool.handler):
        result: JsonValue = await tool.handler(context, fitting)
        return result
    found = await pool.run(lambda: tool.handler(context, fitting))
    return await found if inspect.isawaitable(found) else found


def call_tool(tool: Tool, arguments: Mapping[str, Any], context: CallContext) -> JsonValue:
    """The result of one call; blocks. Raises InvalidValueError for arguments that do not fit the schema, and whatever
    the tool raises."""
    result = tool.handler(context, prepared(tool.name, tool.parameters, arguments))
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _absent(name: str, allowed: Collection[str]) -> Answer:
    if name in NOT_IN_ROLLOUTS:
        return _failed(f"{name} is not available in RL environments.")
    names = ", ".join(sorted(allowed)[:_NAMES_SHOWN]) or "none"
    return _failed(f"Unknown tool '{name[:80]}'. Available tools: {names}.")


def _explained(error: Exception, name: str, context: CallContext) -> Answer:
    if isinstance(error, HermesRLError):
        return _failed(_masked(str(error), context))
    log.info("tool %s failed", name, exc_info=error)
    return _failed(_masked(f"Tool execution failed: {type(error).__name__}: {error}", context))


def _error_in(result: JsonValue) -> str | None:
    """A result that says itself that it could not be had."""
    if not isinstance(result, dict) or not result.get("error"):
        return None
    code = result.get("exit_code", -1)
    return str(result["error"]) if isinstance(code, int) and code < 0 else None


def _failed(error: str) -> Answer:
    return Answer(json.dumps({"error": error}, ensure_ascii=False), error)


def _masked(text: str, context: CallContext) -> str:
    for one in spellings(secret_values(context.settings)):
        text = text.replace(one, MASK)
    return text

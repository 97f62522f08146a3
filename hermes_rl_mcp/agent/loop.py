"""A model and its tools, in turns, until it stops calling them.

Invariant: the conversation only grows, and every call that the model made has exactly one answer in it, in order. One
turn's calls are carried out one after the other: they share a sandbox. What ends the conversation early is said in the
result; only cancellation raises.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hermes_rl_mcp.agent import budget as budgets
from hermes_rl_mcp.agent.budget import BudgetConfig
from hermes_rl_mcp.agent.calls import answer
from hermes_rl_mcp.agent.interfaces import (
    CallContext,
    ChatMessage,
    ChatServer,
    Sandbox,
    Toolbox,
    ToolCall,
    ToolCallParser,
    ToolSchema,
)
from hermes_rl_mcp.agent.pool import ToolPool
from hermes_rl_mcp.agent.result import ARGUMENTS_CHARS, RESULT_CHARS, AgentResult, ToolError
from hermes_rl_mcp.agent.transcript import text_of

log = logging.getLogger(__name__)

MAX_TURNS = 30
USER_TASK_CHARS = 500
TOOL_TIMEOUT_S = 900.0
"""No tool of ours takes longer by itself; one of an MCP server may hang."""


class HermesAgentLoop:
    """One conversation. ``toolbox`` holds the tools; ``tool_schemas`` and ``valid_tool_names`` narrow what is offered.

    ``sandbox`` makes the task's sandbox when a tool first asks for it, and the same one from then on. ``parser`` reads
    calls out of plain text where the server left them there. ``pool``: threads for tools that block; None = its own.
    """

    def __init__(
        self,
        server: ChatServer,
        tool_schemas: Sequence[ToolSchema] | None = None,
        valid_tool_names: Collection[str] | None = None,
        max_turns: int = MAX_TURNS,
        task_id: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        budget_config: BudgetConfig | None = None,
        *,
        toolbox: Toolbox,
        sandbox: Callable[[], Sandbox],
        settings: Mapping[str, str] = MappingProxyType({}),
        state: dict[str, Any] | None = None,
        parser: ToolCallParser | None = None,
        pool: ToolPool | None = None,
        tool_timeout_s: float = TOOL_TIMEOUT_S,
    ) -> None:
        self.task_id = task_id or uuid.uuid4().hex
        self._server = server
        self._schemas = list(toolbox.schemas() if tool_schemas is None else tool_schemas)
        self._allowed = set(toolbox.names() if valid_tool_names is None else valid_tool_names)
        self._max_turns = max_turns
        self._params = {
            "n": 1,
            "temperature": temperature,
            **({"tools": self._schemas} if self._schemas else {}),
            **({} if max_tokens is None else {"max_tokens": max_tokens}),
            **({"extra_body": dict(extra_body)} if extra_body else {}),
        }
        self._budget = budget_config or BudgetConfig()
        self._toolbox = toolbox
        self._sandbox = sandbox
        self._settings = settings
        self._state: dict[str, Any] = {} if state is None else state
        self._parser = parser
        self._pool = pool
        self._tool_timeout_s = tool_timeout_s

    async def run(self, messages: list[ChatMessage]) -> AgentResult:
        """Goes on from ``messages``, to which it adds."""
        result = AgentResult(messages)
        pool = self._pool or ToolPool()
        try:
            await self._converse(result, pool)
        finally:
            if self._pool is None:
                pool.close()
        get_state = getattr(self._server, "get_state", None)
        result.managed_state = get_state() if callable(get_state) else None
        return result

    async def _converse(self, result: AgentResult, pool: ToolPool) -> None:
        context = CallContext(self.task_id, self._sandbox, self._settings, _user_task(result.messages), self._state)
        for turn in range(1, self._max_turns + 1):
            result.turns_used = turn
            try:
                reply = await self._server.chat_completion(messages=result.messages, **self._params)
            except Exception as error:  # noqa: BLE001 - the server's boundary: the rollout says why it ended
                log.warning("task %s, turn %d: the model did not answer: %s", self.task_id, turn, error)
                result.error, result.failure = f"{type(error).__name__}: {error}", error
                return
            choices = _get(reply, "choices")
            if not choices or (message := _get(choices[0], "message")) is None:
                result.error = "The model's answer was empty."
                return
            reasoning = _reasoning(message)
            result.reasoning_per_turn.append(reasoning)
            content, calls = self._read(message)
            said: ChatMessage = {"role": "assistant", "content": content}
            if reasoning is not None:
                said["reasoning_content"] = reasoning
            if calls:
                said["tool_calls"] = [_as_message(call) for call in calls]
            result.messages.append(said)
            if not calls:
                result.finished_naturally = True
                return
            await self._carry_out(calls, turn, result, context, pool)

    def _read(self, message: Any) -> tuple[str, list[ToolCall]]:
        content = text_of(_get(message, "content"))
        calls = [_as_call(one) for one in _get(message, "tool_calls") or ()]
        if not calls and self._parser is not None and self._schemas:
            parsed = self._parser.parse(content, self._schemas)
            if parsed.calls:
                return parsed.content or "", parsed.calls
        return content, calls

    async def _carry_out(
        self, calls: list[ToolCall], turn: int, result: AgentResult, context: CallContext, pool: ToolPool
    ) -> None:
        answers: list[ChatMessage] = []
        for call in calls:
            tool = self._toolbox.get(call.name)
            given = await answer(
                call.name,
                call.arguments,
                toolbox=self._toolbox,
                allowed=self._allowed,
                context=context,
                pool=pool,
                timeout_s=self._tool_timeout_s,
            )
            if given.error is not None:
                shown = call.arguments[:ARGUMENTS_CHARS]
                result.tool_errors.append(ToolError(turn, call.name, shown, given.error, given.text[:RESULT_CHARS]))
            text = given.text
            if len(text) > self._budget.limit(call.name, tool):
                text = await pool.run(lambda text=text, call=call: self._kept(text, call))  # type: ignore[misc]
            answers.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
        if sum(len(one["content"]) for one in answers) > self._budget.turn_budget:
            await pool.run(lambda: budgets.within_turn(answers, self._budget, self._sandbox))
        result.messages.extend(answers)

    def _kept(self, text: str, call: ToolCall) -> str:
        return budgets.kept(text, call.id, self._budget.preview_size, self._sandbox)


def _get(value: Any, name: str) -> Any:
    """Servers answer with objects or with dicts."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _reasoning(message: Any) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        if text := _get(message, name):
            return str(text)
    for detail in _get(message, "reasoning_details") or ():
        if text := _get(detail, "text"):
            return str(text)
    return None


def _as_call(one: Any) -> ToolCall:
    function = _get(one, "function") or {}
    arguments = _get(function, "arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return ToolCall(_get(one, "id") or f"call_{uuid.uuid4().hex[:12]}", str(_get(function, "name") or ""), text)


def _as_message(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _user_task(messages: Sequence[ChatMessage]) -> str:
    first = next((one for one in messages if one.get("role") == "user"), {})
    return text_of(first.get("content"))[:USER_TASK_CHARS]

"""An OpenAI-compatible endpoint as an agent loop sees it, for testing environments on models that are not trained.

Invariant: what it keeps of a conversation is text whose ids were made here; such a trajectory is never ``exact``, so
nothing trains on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hermes_rl_mcp.agent.interfaces import ToolCall, ToolCallParser, ToolSchema
from hermes_rl_mcp.agent.transcript import text_of
from hermes_rl_mcp.envs.endpoint import OPENAI_FINISH
from hermes_rl_mcp.envs.sampling import SamplingClient
from hermes_rl_mcp.envs.trajectory import Completion, Message, Trajectory
from hermes_rl_mcp.errors import InvalidValueError


@dataclass
class OpenAIAgentServer:
    """A ``ChatServer`` for one rollout over chat completions with native tool calls; one call at a time."""

    client: SamplingClient
    parser: ToolCallParser
    """How calls are written in the text that is kept."""
    split: str = "train"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    parse_errors: list[str] = field(default_factory=list)
    """Always empty: the endpoint takes calls apart."""
    _trajectory: Trajectory | None = None
    _seen: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self._trajectory] if self._trajectory else []

    async def chat_completion(
        self,
        *,
        messages: list[Message],
        tools: Sequence[ToolSchema] | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 256,
        extra_body: Mapping[str, Any] = MappingProxyType({}),
        **unused: Any,
    ) -> dict[str, Any]:
        """The next turn: the endpoint's own reply."""
        if n != 1 or len(messages) < self._seen:
            raise InvalidValueError("An agent's conversation only grows, and has one answer a turn.")
        reply = await self.client.openai_reply(
            messages,
            tools=list(tools or []) or None,
            split=self.split,
            extra_body={**self.extra_body, **extra_body},
            temperature=temperature,
            max_tokens=max_tokens,
        )
        self._keep(messages, reply, temperature)
        return reply

    def _keep(self, messages: list[Message], reply: dict[str, Any], temperature: float) -> None:
        encode = self.client.renderer.encode
        if self._trajectory is None:
            self._trajectory = Trajectory([], temperature=temperature)
        fresh = [one for one in messages[self._seen :] if one.get("role") != "assistant"]
        context = "".join(f"{one.get('role')}: {text_of(one.get('content'))}\n" for one in fresh) + "assistant: "
        self._trajectory.add_context(context, encode(context))
        choice = reply["choices"][0]
        message = choice.get("message") or {}
        calls = [_call(one) for one in message.get("tool_calls") or ()]
        text = text_of(message.get("content")) + (self.parser.render(calls) if calls else "")
        finish = OPENAI_FINISH.get(choice.get("finish_reason"))
        version = reply.get("policy_version")
        self._trajectory.add_completion(Completion(text, encode(text), None, finish, version), text)
        self._trajectory.messages = [*messages, {**message, "role": "assistant"}]
        self._seen = len(messages)


def _call(one: Mapping[str, Any]) -> ToolCall:
    function = one.get("function") or {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(str(one.get("id") or ""), str(function.get("name") or ""), text)

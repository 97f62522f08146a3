"""The policy as an agent loop sees it: chat with tools in, and behind it one token-exact conversation.

Invariant: what the model wrote goes back to it token by token; the loop's messages, in which calls are taken apart, are
only read for what the world answered. Where the chat template knows no tools, they are told in a system message and
results come as user messages, both in hermes form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl_mcp.agent.interfaces import ToolCallParser, ToolSchema
from hermes_rl_mcp.agent.parsers.blocks import plain_text
from hermes_rl_mcp.contracts.sampling_api import FinishReason
from hermes_rl_mcp.envs.sampling import SamplingClient, Session
from hermes_rl_mcp.envs.tokenizer import Renderer
from hermes_rl_mcp.envs.trajectory import Completion, Message, Trajectory
from hermes_rl_mcp.errors import InvalidValueError


@dataclass(frozen=True)
class CalledFunction:
    name: str
    arguments: str
    """JSON text as the model wrote it; need not be valid."""


@dataclass(frozen=True)
class AskedCall:
    """One of ``message.tool_calls``, OpenAI's form."""

    id: str
    function: CalledFunction
    type: str = "function"


@dataclass(frozen=True)
class AgentMessage:
    content: str | None
    tool_calls: list[AskedCall]
    role: str = "assistant"
    reasoning_content: str | None = None
    """Always None: thoughts stay in ``content``, where the model wrote them."""


@dataclass(frozen=True)
class AgentChoice:
    message: AgentMessage
    finish_reason: FinishReason | None
    index: int = 0


@dataclass(frozen=True)
class AgentReply:
    choices: list[AgentChoice]


@dataclass
class AgentServer:
    """A ``ChatServer`` for one rollout; one call at a time. Each call's messages begin with those of the one before."""

    client: SamplingClient
    parser: ToolCallParser
    """Of the model's family."""
    split: str = "train"
    limit_tokens: int | None = None
    """Longest conversation; where it leaves no room, a call raises ConversationFullError."""
    parse_errors: list[str] = field(default_factory=list)
    """One line for each block that looked like a call and was none."""
    _session: Session | None = None
    _seen: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """What was sampled; more than one where the chat template rewrote earlier turns."""
        return self._session.trajectories if self._session else []

    async def chat_completion(
        self,
        *,
        messages: list[Message],
        tools: Sequence[ToolSchema] | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 256,
        **unused: Any,
    ) -> AgentReply:
        """The next turn. ``tools`` are those of the first call; ``extra_body`` and the like mean nothing here."""
        if n != 1 or len(messages) < self._seen:
            raise InvalidValueError("An agent's conversation only grows, and has one answer a turn.")
        native = _knows_tools(self.client.renderer)
        if self._session is None:
            told, offered = opening(self.client.renderer, messages, tools or ())
            self._session = self.client.session(told, tools=offered, split=self.split)
        else:
            fresh = [one for one in messages[self._seen :] if one.get("role") != "assistant"]
            self._session.add(*(one if native else as_text(one) for one in fresh))
        self._seen = len(messages)
        completion = await self._session.reply(
            limit_tokens=self.limit_tokens, temperature=temperature, max_tokens=max_tokens
        )
        text = self._as_written(completion)
        # Special tokens are part of some families' calls; the template must write them again.
        self._session.messages[-1]["content"] = text
        parsed = self.parser.parse(text, tools or ())
        self.parse_errors += parsed.errors
        calls = [AskedCall(one.id, CalledFunction(one.name, one.arguments)) for one in parsed.calls]
        return AgentReply([AgentChoice(AgentMessage(parsed.content, calls), completion.finish_reason)])

    def _as_written(self, completion: Completion) -> str:
        """With special tokens, without the one that ended the turn."""
        renderer, ids = self.client.renderer, completion.token_ids
        ended = bool(ids) and completion.finish_reason == "stop" and ids[-1] in renderer.tokenizer.all_special_ids
        return renderer.decode(ids[:-1] if ended else ids, special=True)


def opening(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema]
) -> tuple[list[Message], list[ToolSchema] | None]:
    """Messages and tools as the chat template gets them."""
    if _knows_tools(renderer):
        return list(messages), list(tools)
    return with_tools(messages, tools) if tools else list(messages), None


def _knows_tools(renderer: Renderer) -> bool:
    return "tool" in str(renderer.tokenizer.chat_template)


def with_tools(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The conversation with a system message that tells of the tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = '<tool_call>\n{"name": <function name>, "arguments": <object>}\n</tool_call>'
    text = f"Functions you may call, one JSON schema a line:\n<tools>\n{listed}\n</tools>\nTo call one, write\n{form}"
    first, rest = (messages[0], messages[1:]) if messages and messages[0].get("role") == "system" else ({}, messages)
    said = str(first.get("content") or "")
    return [{"role": "system", "content": f"{said}\n\n{text}" if said else text}, *rest]


def as_text(message: Message) -> Message:
    """A tool's result as a user message; any other message as it is."""
    if message.get("role") != "tool":
        return message
    content = plain_text(message.get("content"))
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}

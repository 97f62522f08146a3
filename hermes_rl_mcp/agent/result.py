"""What an agent's conversation with its tools came to. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hermes_rl_mcp.agent.interfaces import ChatMessage

ARGUMENTS_CHARS = 200
RESULT_CHARS = 500


@dataclass(frozen=True)
class ToolError:
    """A call that failed."""

    turn: int
    """The first is 1."""
    tool_name: str
    arguments: str
    """The first 200 characters."""
    error: str
    tool_result: str
    """The first 500 characters of what the model was told."""


@dataclass
class AgentResult:
    """One conversation. It has no field for the answer: that is the last assistant message."""

    messages: list[ChatMessage]
    managed_state: dict[str, Any] | None = None
    """Tokens, masks and logprobs where the server keeps them (its ``get_state``)."""
    turns_used: int = 0
    """Calls of the model, the failed one included."""
    finished_naturally: bool = False
    """The model stopped calling tools; otherwise the turns ran out or the server failed (``error``)."""
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    tool_errors: list[ToolError] = field(default_factory=list)
    error: str | None = None
    """Why the server's failure ended the conversation."""
    failure: Exception | None = field(default=None, repr=False)
    """The exception behind ``error``, where there was one."""

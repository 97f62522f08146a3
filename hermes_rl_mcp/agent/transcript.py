"""A conversation with tools as text that a person reads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_rl_mcp.agent.interfaces import ChatMessage

THINKING_CHARS = 300
ARGUMENTS_CHARS = 200
RESULT_CHARS = 500


def text_of(content: Any) -> str:
    """A message's content as text: as it is, or those parts of a list that are text; empty for None."""
    if isinstance(content, list):
        parts = (part.get("text") if isinstance(part, Mapping) else getattr(part, "text", None) for part in content)
        return "".join(str(part or "") for part in parts)
    return "" if content is None else str(content)


def readable(messages: Sequence[ChatMessage]) -> str:
    """Sections in order: ``[SYSTEM]``, ``[USER]``, ``[ASSISTANT thinking]``, ``[ASSISTANT]``, ``[TOOL CALL]`` and
    ``[TOOL RESULT]``; thoughts, arguments and results are cut to 300, 200 and 500 characters."""
    return "\n".join(f"[{head}] {text}" for message in messages for head, text in _sections(message))


def _sections(message: ChatMessage) -> Iterator[tuple[str, str]]:
    role, content = str(message.get("role")), text_of(message.get("content"))
    if role == "tool":
        yield "TOOL RESULT", _cut(content, RESULT_CHARS)
        return
    if thoughts := message.get("reasoning_content"):
        yield f"{role.upper()} thinking", _cut(str(thoughts), THINKING_CHARS)
    if content or not message.get("tool_calls"):
        yield role.upper(), content
    for call in message.get("tool_calls") or ():
        function: dict[str, Any] = call.get("function") or {}
        yield "TOOL CALL", f"{function.get('name')}({_cut(str(function.get('arguments')), ARGUMENTS_CHARS)})"


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."

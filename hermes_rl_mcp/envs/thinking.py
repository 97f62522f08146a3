"""What ``thinking_mode`` and its fields ask of an endpoint: keys of a request, or a system prompt.

Invariant: nothing is added unless one of the four fields is set. Endpoints of type openai are told by their own keys;
to all others, which take tokens, a system prompt says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from hermes_rl_mcp.envs.config import BaseEnvConfig
from hermes_rl_mcp.envs.trajectory import Message

THINKING_PROMPT = (
    "Before you answer, think the problem through inside <think> and </think>. Write the answer after </think>; what "
    "is inside is not read."
)


def is_thinking(config: BaseEnvConfig) -> bool:
    """An effort or a number of tokens turns it on, too."""
    return config.thinking_mode or config.reasoning_effort is not None or config.max_reasoning_tokens is not None


def request_keys(config: BaseEnvConfig, base_url: str) -> dict[str, Any]:
    """For an endpoint of type openai. OpenAI's own takes an effort alone; OpenRouter and its like take ``reasoning``,
    with an effort or a number of tokens, and of both the effort."""
    if not is_thinking(config):
        return {}
    if urlsplit(base_url).hostname == "api.openai.com":
        return {"reasoning_effort": config.reasoning_effort or "medium"}
    reasoning: dict[str, Any] = {"enabled": True}
    if config.reasoning_effort is not None:
        reasoning["effort"] = config.reasoning_effort
    elif config.max_reasoning_tokens is not None:
        reasoning["max_tokens"] = config.max_reasoning_tokens
    return {"reasoning": reasoning}


def with_thinking(config: BaseEnvConfig, messages: Sequence[Message]) -> list[Message]:
    """The conversation with the system prompt in front, joined to the one that is there."""
    prompt = config.custom_thinking_prompt or THINKING_PROMPT
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{prompt}\n\n{messages[0].get('content') or ''}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]

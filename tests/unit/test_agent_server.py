"""The policy as an agent loop sees it: calls taken apart, tokens kept as sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from env_rig import END_ID, TINY, Sampler, serving

from hermes_rl_mcp.agent.parsers import get_parser
from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.envs import APIServerConfig, SamplingClient
from hermes_rl_mcp.envs.agent_server import AgentServer
from hermes_rl_mcp.envs.tokenizer import load_tokenizer
from hermes_rl_mcp.errors import InvalidValueError

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = 'so: <tool_call>{"name": "look",  "arguments": {}}</tool_call>'


async def _converse(template: str | None = None) -> tuple[AgentServer, list[Any], list[str]]:
    """Two turns, the first of which calls a tool; prompts as the model saw them."""
    tokenizer = load_tokenizer(str(TINY))
    if template:
        tokenizer.chat_template = template
    turns = iter([CALL, "<tool_call>{]</tool_call>done"])
    with serving(Sampler(answer=lambda prompt, index: [*next(turns).encode(), END_ID])) as sampler:
        client = SamplingClient([APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")], lambda: tokenizer)
        server = AgentServer(client, get_parser("hermes"))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
        replies = [await server.chat_completion(messages=messages, tools=[TOOL])]
        [call] = replies[0].choices[0].message.tool_calls
        messages.append({"role": "assistant", "content": "so:", "tool_calls": [{"id": call.id}]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "here"})
        replies.append(await server.chat_completion(messages=messages, tools=[TOOL]))
        with pytest.raises(InvalidValueError, match="only grows"):
            await server.chat_completion(messages=messages[:1], tools=[TOOL])
        await client.close()
        ids = [request["prompt"]["prompt_token_ids"] for request in sampler.requests]
    return server, replies, [tokenizer.decode(one) for one in ids]


@pytest.mark.anyio
async def test_calls_are_taken_apart_and_what_was_sampled_goes_back_as_it_was() -> None:
    server, replies, prompts = await _converse()
    first, second = (reply.choices[0].message for reply in replies)
    assert (first.content, first.tool_calls[0].function.name) == ("so:", "look")
    assert (second.content, second.tool_calls, len(server.parse_errors)) == ("done", [], 1)
    assert f"{CALL}<|end|>" in prompts[1] and "<tool_response>\nhere\n</tool_response>" in prompts[1]
    [trajectory] = server.trajectories
    trained = [token for token, mask in zip(trajectory.tokens_T, trajectory.masks_T, strict=True) if mask != MASKED]
    assert trained == [*CALL.encode(), END_ID, *b"<tool_call>{]</tool_call>done", END_ID]


@pytest.mark.anyio
async def test_tools_stand_in_a_system_text_where_the_template_knows_none() -> None:
    _, _, prompts = await _converse()
    assert json.dumps(TOOL["function"]) in prompts[0] and "<tool_call>" in prompts[0]


@pytest.mark.anyio
async def test_a_template_that_knows_tools_writes_them_and_their_results_itself() -> None:
    template = (
        "{% if tools %}T:{{ tools[0].function.name }};{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' %}<|end|>{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    server, _, prompts = await _converse(template)
    assert prompts[0] == "T:look;user:Where?;assistant:"
    assert prompts[1] == f"{prompts[0]}{CALL}<|end|>;tool:here;assistant:"
    assert len(server.trajectories) == 1

"""What thinking_mode and its fields ask of an endpoint, and thoughts of earlier turns that a chat template drops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from env_rig import TINY, Sampler, say, serving

from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, SamplingClient
from hermes_rl_mcp.envs.thinking import THINKING_PROMPT, request_keys
from hermes_rl_mcp.envs.tokenizer import load_tokenizer

pytestmark = pytest.mark.anyio

ASK = [{"role": "user", "content": "3+5="}]
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}assistant:"
)


class Asking(BaseEnv):
    name = "asking"

    async def get_next_item(self) -> int:
        return 1

    def get_messages(self, item: int) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Be brief."}, *ASK]

    def score_answer(self, item: int, completion: Any) -> float:
        return float(len(completion.text))


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with serving(Sampler()) as running:
        yield running


async def asked(sampler: Sampler, server_type: str, **fields: Any) -> dict[str, Any]:
    """The body of the one request that a group of two makes."""
    config = BaseEnvConfig(group_size=2, max_token_length=8, tokenizer_name=str(TINY), **fields)
    env = Asking(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type=server_type)])  # type: ignore[arg-type]
    try:
        await env.groups_for(1)
    finally:
        await env.server.close()
    [body] = sampler.requests
    return body


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, None),
        ({"thinking_mode": True}, {"enabled": True}),
        ({"reasoning_effort": "low", "max_reasoning_tokens": 2000}, {"enabled": True, "effort": "low"}),
        ({"max_reasoning_tokens": 2000}, {"enabled": True, "max_tokens": 2000}),
    ],
    ids=["off", "mode", "effort", "tokens"],
)
async def test_an_openai_endpoint_is_asked_to_reason_by_its_own_key(
    sampler: Sampler, fields: dict[str, Any], reasoning: Any
) -> None:
    body = await asked(sampler, "openai", **fields)
    assert body.get("reasoning") == reasoning
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "3+5="]


def test_openai_itself_takes_an_effort_alone() -> None:
    config = BaseEnvConfig(thinking_mode=True)
    assert request_keys(config, "https://api.openai.com/v1") == {"reasoning_effort": "medium"}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, ""),
        ({"thinking_mode": True}, THINKING_PROMPT),
        ({"thinking_mode": True, "custom_thinking_prompt": "Hm!"}, "Hm!"),
    ],
    ids=["off", "built_in", "own"],
)
async def test_an_endpoint_that_takes_tokens_is_told_in_the_system_prompt(
    sampler: Sampler, fields: dict[str, Any], prompt: str
) -> None:
    body = await asked(sampler, "vllm", **fields)
    text = bytes(one for one in body["prompt"]["prompt_token_ids"] if one < 256).decode()
    assert "Be brief." in text and "reasoning" not in body
    assert text.startswith(prompt) if prompt else THINKING_PROMPT not in text


@pytest.fixture
def forgetful() -> Any:
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.chat_template = FORGETFUL
    return tokenizer


def client_of(sampler: Sampler, tokenizer: Any, server_type: str = "vllm") -> SamplingClient:
    entry = APIServerConfig(base_url=f"{sampler.url}/v1", server_type=server_type)  # type: ignore[arg-type]
    return SamplingClient([entry], lambda: tokenizer)


@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "dropped"])
async def test_thoughts_that_are_preserved_keep_a_conversation_in_one_sequence(
    sampler: Sampler, forgetful: Any, preserve: bool
) -> None:
    sampler.answer = say("<think>hm</think>8")
    client = client_of(sampler, forgetful)
    async with client.managed_server(preserve_think_blocks=preserve) as managed:
        first = await managed.chat_completion(messages=ASK, max_tokens=64)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await managed.chat_completion(messages=[*ASK, said, {"role": "user", "content": "sure?"}], max_tokens=64)
        nodes = managed.get_state()["nodes"]
    session = client.session(ASK, max_tokens=64, preserve_think_blocks=preserve)
    await session.reply()
    session.add({"role": "user", "content": "sure?"})
    await session.reply()
    await client.close()
    assert len(nodes) == len(session.trajectories) == (1 if preserve else 2)
    turns = [sum(mask != MASKED for mask in node.masked_tokens) for node in nodes]
    answer = len("<think>hm</think>8") + 1
    assert turns == ([2 * answer] if preserve else [answer, answer])
    assert nodes[-1].full_text.count("<think>hm</think>8") == (2 if preserve else 1)
    assert nodes[0].tokens == session.trajectories[0].tokens_T


@pytest.mark.parametrize("server_type", ["openai", "trl"])
async def test_ids_made_from_a_text_are_masked_whole(sampler: Sampler, forgetful: Any, server_type: str) -> None:
    client = client_of(sampler, forgetful, server_type)
    client.configs[0].base_url = f"{sampler.url}{'/v1' if server_type == 'openai' else ''}"
    async with client.managed_server() as managed:
        await managed.chat_completion(messages=ASK, n=2, max_tokens=8)
        nodes = managed.get_state()["nodes"]
    await client.close()
    for node in nodes:
        assert set(node.masked_tokens) == {MASKED} and set(node.logprobs) == {1.0}
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        assert node.metadata["exact"] is False

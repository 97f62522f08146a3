"""Sampling over real HTTP: the ids sent are the ids kept, turns are appended, patience is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest
from env_rig import END_ID, TINY, Sampler, say, serving

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB
from hermes_rl_mcp.envs import APIServerConfig, SamplingClient
from hermes_rl_mcp.envs.tokenizer import load_tokenizer
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

pytestmark = pytest.mark.anyio

ASK = [{"role": "user", "content": "3+5="}]
NO_TEXT = [0xFF, 0xC3, 0x28]
"""Bytes that are no UTF-8: their text is replacement characters, which tokenise to other ids."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(TINY))


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with serving(Sampler()) as running:
        yield running


class Connect(Protocol):
    def __call__(self, server_type: str = "vllm", tokenizer: Any = None, **config: Any) -> SamplingClient: ...


@pytest.fixture
async def connect(sampler: Sampler, tokenizer: Any) -> AsyncIterator[Connect]:
    """A client of the scripted sampler; closed with the test."""
    made: list[SamplingClient] = []
    usual = tokenizer

    def client(server_type: str = "vllm", tokenizer: Any = None, **config: Any) -> SamplingClient:
        entry = APIServerConfig.model_validate({"base_url": f"{sampler.url}/v1", "server_type": server_type, **config})
        made.append(SamplingClient([entry], lambda: tokenizer or usual))
        return made[-1]

    yield client
    for one in made:
        await one.close()


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 3])
async def test_sampled_ids_and_logprobs_are_kept_as_they_came(
    sampler: Sampler, connect: Connect, tokenizer: Any, server_type: str, n: int
) -> None:
    sampler.answer = lambda prompt, index: [*NO_TEXT, 48 + index, END_ID]
    trajectories = await connect(server_type).chat(ASK, n=n, max_tokens=9, temperature=0.7)
    prompt = tokenizer.encode("<|user|>3+5=<|end|><|assistant|>", add_special_tokens=False)
    assert len(trajectories) == n
    for index, trajectory in enumerate(trajectories):
        sampled = [*NO_TEXT, 48 + index, END_ID]
        assert trajectory.tokens_T == prompt + sampled
        assert trajectory.masks_T == [MASKED] * len(prompt) + sampled
        assert trajectory.logprobs_T == [NO_LOGPROB] * len(prompt) + [-(i + 1) / 64 for i in range(5)]
        assert trajectory.last.text.endswith(str(index))
        assert trajectory.item(1.0)["overrides"] == {
            "policy_version": 3,
            "finish_reason": "stop",
            "reward_parts": {},
            "parse_failed": None,
            "temperature": 0.7,
            "set_advantage_to_zero": False,
        }


async def test_a_second_turn_appends_and_never_tokenises_what_was_sampled(
    sampler: Sampler, connect: Connect, tokenizer: Any
) -> None:
    sampler.answer = lambda prompt, index: [*NO_TEXT, END_ID]
    session = connect().session(ASK, max_tokens=8)
    await session.reply()
    session.add({"role": "user", "content": "sure?"})
    sampler.answer = say("yes")
    answer = await session.reply()
    assert answer.text == "yes"
    assert len(session.trajectories) == 1
    first, second = (request["prompt"]["prompt_token_ids"] for request in sampler.requests)
    added = tokenizer.encode("<|user|>sure?<|end|><|assistant|>", add_special_tokens=False)
    assert second == [*first, *NO_TEXT, END_ID, *added]
    trajectory = session.trajectory
    assert trajectory.tokens_T == [*second, *b"yes", END_ID]
    trained = [token for token, mask in zip(trajectory.tokens_T, trajectory.masks_T, strict=True) if mask != MASKED]
    assert trained == [*NO_TEXT, END_ID, *b"yes", END_ID]


async def test_a_turn_cut_by_length_is_closed_by_the_template(
    sampler: Sampler, connect: Connect, tokenizer: Any
) -> None:
    sampler.answer = lambda prompt, index: [*b"unending"]
    session = connect().session(ASK, max_tokens=3)
    answer = await session.reply()
    session.add({"role": "user", "content": "go on"})
    await session.reply()
    assert (answer.text, answer.finish_reason) == ("une", "length")
    assert len(session.trajectories) == 1
    suffix = [END_ID, *tokenizer.encode("<|user|>go on<|end|><|assistant|>", add_special_tokens=False)]
    assert sampler.requests[1]["prompt"]["prompt_token_ids"][-len(suffix) :] == suffix


async def test_a_template_that_rewrites_history_begins_a_new_sample_and_that_is_said(
    sampler: Sampler, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    forgetful = load_tokenizer(str(TINY))
    forgetful.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}assistant:"
    )
    sampler.answer = say("<think>hm</think>8")
    client = connect(tokenizer=forgetful)
    session = client.session(ASK, max_tokens=64)
    await session.reply()
    session.add({"role": "user", "content": "sure?"})
    await session.reply()
    assert len(session.trajectories) == 2
    second = session.trajectory
    assert second.text.startswith("user:3+5=<|end|>assistant:8<|end|>user:sure?")
    assert len(second.completions) == 1
    assert client.rewritten == 1
    assert "a new sample begins" in caplog.text


async def test_familiar_names_give_what_atropos_gives(sampler: Sampler, connect: Connect, tokenizer: Any) -> None:
    sampler.answer = say("8")
    server = connect()
    reply = await server.chat_completion(messages=ASK, n=2, max_tokens=4, timeout=5)
    assert [choice.message.content for choice in reply.choices] == ["8", "8"]
    assert (await server.completion(prompt="3+5=", max_tokens=4)).choices[0].text == "8"
    async with server.managed_server(tokenizer=tokenizer) as managed:
        await managed.chat_completion(messages=ASK, n=2, max_tokens=4)
        follow_up = [*ASK, {"role": "assistant", "content": "8"}, {"role": "user", "content": "sure?"}]
        await managed.chat_completion(messages=follow_up, max_tokens=4)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == 2
    assert sum(mask != MASKED for mask in nodes[0].masked_tokens) == 4
    assert sum(mask != MASKED for mask in nodes[1].masked_tokens) == 2
    assert nodes[0].metadata["finish_reason"] == "stop"


async def test_an_empty_answer_is_not_taken_for_the_start_of_the_next_call(sampler: Sampler, connect: Connect) -> None:
    sampler.answer = lambda prompt, index: []
    async with connect().managed_server() as managed:
        await managed.chat_completion(messages=ASK, max_tokens=4)
        await managed.chat_completion(messages=ASK, max_tokens=4)
        assert len(managed.get_state()["nodes"]) == 2


async def test_equal_conversations_that_go_on_at_once_stay_apart(sampler: Sampler, connect: Connect) -> None:
    sampler.answer = say("8")
    follow_up = [*ASK, {"role": "assistant", "content": "8"}, {"role": "user", "content": "sure?"}]
    async with connect().managed_server() as managed:
        await managed.chat_completion(messages=ASK, n=2, max_tokens=4)
        await asyncio.gather(*(managed.chat_completion(messages=follow_up, max_tokens=4) for _ in range(2)))
        nodes = managed.get_state()["nodes"]
    assert [sum(mask != MASKED for mask in node.masked_tokens) for node in nodes] == [4, 4]


async def test_busy_and_lost_connections_are_waited_out(sampler: Sampler, connect: Connect) -> None:
    sampler.statuses = [503, 429, 503, 503]
    sampler.drop_next = 1
    [trajectory] = await connect().chat(ASK, max_tokens=4)
    assert trajectory.last.text == "8"
    assert len(sampler.requests) == 5


async def test_a_server_error_is_tried_three_times_and_a_refusal_once(sampler: Sampler, connect: Connect) -> None:
    sampler.statuses = [500] * 9
    with pytest.raises(EndpointError, match="500: scripted"):
        await connect().chat(ASK, n=4, max_tokens=4)
    assert len(sampler.requests) == 3
    sampler.statuses = [422]
    with pytest.raises(EndpointError, match="422"):
        await connect().chat(ASK, max_tokens=4)
    assert len(sampler.requests) == 4


async def test_a_server_that_is_not_there_is_given_up(connect: Connect) -> None:
    server = connect(base_url="http://127.0.0.1:9/v1")
    server.reconnect_s = 0.0
    with pytest.raises(EndpointError, match="could not be reached"):
        await server.chat(ASK, max_tokens=4)


async def test_an_answer_of_another_server_type_says_so(sampler: Sampler, connect: Connect) -> None:
    server = connect("sglang")
    sampler.reply = {"choices": []}
    with pytest.raises(EndpointError, match="not of server type sglang"):
        await server.chat(ASK, max_tokens=4)


async def test_openai_endpoints_give_text_whose_ids_are_marked_as_made_up(sampler: Sampler, connect: Connect) -> None:
    server = connect("openai", api_key="$TEST_ENV_KEY")
    sampler.answered_choices = 1  # an endpoint that ignores n
    trajectories = await server.chat(ASK, n=3, max_tokens=4)
    assert [trajectory.last.text for trajectory in trajectories] == ["8", "8", "8"]
    assert trajectories[0].tokens_T[-2:] == [ord("8"), END_ID]
    assert trajectories[0].exact is False
    assert trajectories[0].item(1.0)["inference_logprobs"] is None
    assert [request["n"] for request in sampler.requests] == [3, 1, 1]


async def test_a_key_named_by_its_variable_comes_from_the_environment(
    sampler: Sampler, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_ENV_KEY", "from-environment")
    await connect("openai", api_key="$TEST_ENV_KEY").chat(ASK, max_tokens=4)
    assert sampler.requests[0]["headers"]["authorization"] == "Bearer from-environment"


async def test_configurations_that_cannot_work_are_refused(connect: Connect) -> None:
    with pytest.raises(InvalidValueError):
        await connect(base_url="").chat(ASK)


async def test_a_trl_server_gives_ids_without_logprobs(sampler: Sampler, connect: Connect, tokenizer: Any) -> None:
    client = connect("trl", base_url=f"{sampler.url}/v1")
    sampler.answer = lambda prompt, index: [*b"8 apples", END_ID][index:]
    trajectories = await client.chat(ASK, n=2, max_tokens=8, temperature=0.7, top_p=0.9)
    assert [one.last.text for one in trajectories] == ["8 apples", " apples"]
    assert [one.last.finish_reason for one in trajectories] == ["length", "stop"]
    assert [one.exact for one in trajectories] == [False, False]
    body = {k: v for k, v in sampler.requests[0].items() if k not in ("headers", "policy_version")}
    assert body == {
        **{"path": "/generate/", "prompts": ["<|user|>3+5=<|end|><|assistant|>"], "n": 2, "max_tokens": 8},
        **{"repetition_penalty": 1.0, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0},
    }
    with pytest.raises(InvalidValueError, match="cannot stop at a text"):
        await client.chat(ASK, stop=["x"])

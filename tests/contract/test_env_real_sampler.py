"""The environment's client against the real sampler and the real tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from env_rig import TINY, child_environ, until
from leash import leash, leashed

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB
from hermes_rl_mcp.envs import APIServerConfig, SamplingClient
from hermes_rl_mcp.envs.scoring import parse
from hermes_rl_mcp.envs.tokenizer import load_tokenizer
from hermes_rl_mcp.errors import EndpointError, InvalidValueError

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
"""Between the sampler's logprobs, decoded step by step, and one pass over the whole sequence, in fp32."""


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sampler")
    listener = socket.create_server(("127.0.0.1", 0))
    fd = listener.fileno()
    command = [sys.executable, "-P", "-m", "trainer.serve", "--model", "builtin:tiny", "--listen-fd", str(fd)]
    environ = {**child_environ(dict(os.environ)), "HERMES_HOME": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--torch-threads", "1"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=leashed(environ),
            pass_fds=(fd, leash()),
        )
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        until(lambda: _ready(process, url, folder / "log"), timeout_s=250)
        yield url
    finally:
        process.terminate()
        process.wait(60)
        listener.close()


def _ready(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return bool(httpx.get(f"{url}/health", timeout=2).json()["status"] == "ok")
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_logprobs_kept_over_two_turns_are_those_of_the_model_on_exactly_these_tokens(
    sampler: str, server_type: Literal["vllm", "sglang"]
) -> None:
    tokenizer: Any = load_tokenizer(str(TINY))
    config = APIServerConfig(base_url=f"{sampler}/v1", server_type=server_type)
    client = SamplingClient([config], lambda: tokenizer)
    session = client.session([{"role": "user", "content": "3+5="}], max_tokens=12)
    await session.reply()
    session.add({"role": "user", "content": "2+2="})
    await session.reply()
    await client.close()
    assert len(session.trajectories) == 1
    trajectory = session.trajectory
    async with httpx.AsyncClient(timeout=30) as http:
        reply = (await http.post(f"{sampler}/logprobs", json={"input_ids": trajectory.tokens_T})).json()
    assert [entry["token_id"] for entry in reply["logprobs"]] == trajectory.tokens_T
    trained = 0
    for entry, mask, logprob in zip(reply["logprobs"], trajectory.masks_T, trajectory.logprobs_T, strict=True):
        if mask == MASKED:
            assert logprob == NO_LOGPROB
        else:
            trained += 1
            assert abs(entry["logprob"] - logprob) < TOLERANCE
    assert trained == sum(len(completion.token_ids) for completion in trajectory.completions) >= 2
    assert trajectory.notes.policy_version == 0


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_given_tokens_are_scored_in_the_context_they_were_sampled_in_and_in_any_other(
    sampler: str, server_type: Literal["vllm", "sglang"]
) -> None:
    tokenizer: Any = load_tokenizer(str(TINY))
    client = SamplingClient([APIServerConfig(base_url=f"{sampler}/v1", server_type=server_type)], lambda: tokenizer)
    [trajectory] = await client.chat([{"role": "user", "content": "3+5="}], max_tokens=12)
    at, sampled = trajectory.starts[0], trajectory.last
    assert trajectory.tokens_T[at:] == sampled.token_ids
    own = await client.score_tokens(trajectory.tokens_T[:at], sampled.token_ids, top=50)
    assert [one.token_id for one in own.tokens] == sampled.token_ids
    assert own.policy_version == 0
    for one, logprob in zip(own.tokens, sampled.logprobs or [], strict=True):
        assert abs(one.logprob - logprob) < TOLERANCE
        values = [value for _, value in one.top]
        assert len(one.top) == 50 and values == sorted(values, reverse=True)
        assert dict(one.top).get(one.token_id, one.logprob) == pytest.approx(one.logprob, abs=1e-6)
    hinted = [*trajectory.tokens_T[:1], *tokenizer.encode("Say it in words. "), *trajectory.tokens_T[1:at]]
    other = await client.score_tokens(hinted, sampled.token_ids, top=1, adapter=False)
    async with httpx.AsyncClient(timeout=30) as http:
        ids = [*hinted, *sampled.token_ids]
        reply = (await http.post(f"{sampler}/logprobs", json={"input_ids": ids})).json()
    expected = [entry["logprob"] for entry in reply["logprobs"][len(hinted) :]]
    assert [one.logprob for one in other.tokens] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx([one.logprob for one in own.tokens], abs=1e-3)
    assert all(len(one.top) == 1 for one in other.tokens)
    told = await client.get_logprobs(input_ids=trajectory.tokens_T, top_k=50)
    assert told["prompt_tokens"] == trajectory.tokens_T
    assert told["prompt_topk_token_ids"][0] == [] and len(told["prompt_topk_logprobs"]) == len(trajectory.tokens_T)
    assert told["prompt_topk_token_ids"][at:] == [[token for token, _ in one.top] for one in own.tokens]
    await client.close()


async def test_an_answer_without_logprobs_of_the_given_tokens_is_an_error() -> None:
    for reply in ({"text": ["8"]}, {"prompt_logprobs": [None, {"7": -0.5}]}, {"prompt_logprobs": [None, {"6": 0.5}]}):
        with pytest.raises(EndpointError, match="no logprobs of the given tokens"):
            parse("vllm", reply, 1, [6], 0)
    stock = {"prompt_logprobs": [None, {"6": {"logprob": -0.5, "rank": 2}, "7": {"logprob": -0.1, "rank": 1}}]}
    assert parse("vllm", stock, 1, [6], 1).tokens[0].top == [(7, -0.1)]
    assert parse("vllm", {"prompt_logprobs": [stock["prompt_logprobs"]]}, 1, [6], 1).tokens[0].logprob == -0.5


async def test_an_endpoint_that_cannot_score_given_tokens_says_so(sampler: str) -> None:
    tokenizer: Any = load_tokenizer(str(TINY))
    client = SamplingClient([APIServerConfig(base_url=f"{sampler}/v1", server_type="openai")], lambda: tokenizer)
    with pytest.raises(InvalidValueError, match="type openai does not tell"):
        await client.score_tokens([5], [6])
    with pytest.raises(InvalidValueError, match="after 0 of context"):
        await client.score_tokens([], [6])
    await client.close()

"""The arithmetic environment against a sampler over real HTTP: what it asks, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from env_rig import END_ID, TINY, Sampler, say, serving

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem, evaluation_problems
from hermes_rl_mcp.envs import APIServerConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()


@pytest.fixture
async def environment(sampler: Sampler) -> AsyncIterator[ArithmeticEnv]:
    with serving(sampler):
        config = ArithmeticConfig(group_size=4, max_token_length=12, tokenizer_name=str(TINY))
        made = ArithmeticEnv(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
        await made.setup()
        yield made
        await made.server.close()


async def test_a_group_is_one_sampling_call_and_its_parts_are_told_apart(
    environment: ArithmeticEnv, sampler: Sampler
) -> None:
    answers = ["8", "It is 8", "9", "It is 9"]
    sampler.answer = lambda prompt, index: [*answers[index].encode(), END_ID]
    group, backlog = await environment.collect_trajectories(Problem("3+5=", 8))

    assert [(request["n"], request["max_tokens"]) for request in sampler.requests] == [(4, 12)]
    assert backlog == []
    assert isinstance(group, dict)
    assert group["scores"] == [1.0, 0.0, 0.0, 0.0]
    overrides = group["overrides"]
    assert overrides is not None
    assert [notes["reward_parts"] for notes in overrides] == [
        {"correct": 1.0, "format": 1.0},
        {"correct": 1.0, "format": 0.0},
        {"correct": 0.0, "format": 1.0},
        {"correct": 0.0, "format": 0.0},
    ]
    prompt = [259, *b"3+5=", END_ID, 260]
    assert group["tokens"][0] == [*prompt, *b"8", END_ID]
    assert group["masks"][0] == [-100] * len(prompt) + [*b"8", END_ID]


async def test_an_answer_cut_off_by_the_token_limit_gets_no_reward(
    environment: ArithmeticEnv, sampler: Sampler
) -> None:
    sampler.answer = lambda prompt, index: list(b"8")  # the right number, and never an end
    group, _ = await environment.collect_trajectories(Problem("3+5=", 8))
    assert isinstance(group, dict)
    assert group["scores"] == [0.0] * 4


async def test_evaluation_asks_every_held_out_problem_once_and_greedily(
    environment: ArithmeticEnv, sampler: Sampler
) -> None:
    sampler.answer = say("It is 8")
    report = await environment.evaluate()

    problems = evaluation_problems(1, 100)
    asked = [bytes(request["prompt"]["prompt_token_ids"][1:-2]).decode() for request in sampler.requests]
    assert sorted(asked) == sorted(problem.text for problem in problems)
    assert {request["temperature"] for request in sampler.requests} == {0.0}
    right = sum(problem.answer == 8 for problem in problems) / len(problems)
    assert 0 < right < 1
    assert report.metrics == {"eval/percent_correct": right, "eval/percent_bare": 0.0, "eval/reward_mean": 0.0}
    assert report.samples[0].keys() == {"problem", "gold", "answer", "score", "correct", "format"}

"""Environments whose policy calls tools: real sandboxes and real HTTP, a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from env_rig import END_ID, TINY, Sampler, http_server, serving
from fastapi import FastAPI, Request
from pydantic import ValidationError

from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.transcript import readable
from hermes_rl_mcp.contracts.rollout_api import MASKED
from hermes_rl_mcp.envs import APIServerConfig, EvalReport, Score
from hermes_rl_mcp.envs.base import RolloutsFailedError
from hermes_rl_mcp.envs.groups import checked
from hermes_rl_mcp.envs.hermes import HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.envs.hook_rules import HookError, check_hooks
from hermes_rl_mcp.envs.turns import discounted_advantages, turn_of_token

CALL = '<tool_call>{"name": "terminal", "arguments": {"command": "echo %s > said; pwd"}}</tool_call>'
RESULT = b"<tool_response>"


class Echoes(HermesAgentBaseEnv):
    """The item has to be written into a file of the sandbox."""

    folders: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.folders = []

    async def get_next_item(self) -> str:
        return "good"

    async def get_eval_items(self, count: int) -> list[str]:
        return ["good", "held"][:count]

    def format_prompt(self, item: str) -> str:
        return f"Write {item}."

    def prepare(self, item: str, ctx: ToolContext) -> None:
        ctx.write_file("task", item)

    def compute_reward(self, item: str, result: AgentResult, ctx: ToolContext) -> float | Score:
        self.folders.append(ctx.terminal("pwd")["output"].strip())
        said = ctx.terminal("cat said; cmp task said || true")["output"].strip()
        return Score(float(said.startswith(item)), {"correct": float(said.startswith(item))})


def policy(words: Callable[[int], str]) -> Callable[[list[int], int], list[int]]:
    """Calls the terminal with the next word, then says it is done."""
    count = iter(range(10_000))

    def answer(prompt: list[int], index: int) -> list[int]:
        if RESULT in bytes(one for one in prompt if one < 256):
            return [*b"done", END_ID]
        return [*(CALL % words(next(count))).encode(), END_ID]

    return answer


def made(sampler: Sampler, kind: type[HermesAgentBaseEnv] = Echoes, **fields: Any) -> HermesAgentBaseEnv:
    config = HermesAgentEnvConfig(
        **{"tokenizer_name": str(TINY), "group_size": 2, "enabled_toolsets": ["terminal", "file"], **fields}
    )
    return kind(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])


async def group_of(env: HermesAgentBaseEnv, item: Any = "good") -> Mapping[str, Any]:
    try:
        await env.setup()
        group, more = await env.collect_trajectories(item)
        assert more == [] and isinstance(group, dict)
        return group
    finally:
        await env.cleanup()
        await env.server.close()


@pytest.mark.anyio
async def test_a_group_is_scored_in_the_sandboxes_of_its_rollouts_and_trains_what_the_policy_wrote() -> None:
    with serving(Sampler(policy(lambda place: ("good", "bad")[place]))) as sampler:
        env = made(sampler)
        group = await group_of(env)
    data = checked(group, group_size=2, max_token_len=10_000)
    assert sorted(data.scores) == [0.0, 1.0]
    for tokens_T, masks_T in zip(data.tokens, data.masks, strict=True):
        wrote = bytes(one for one in masks_T if 0 <= one < 256).decode()
        assert wrote.startswith("<tool_call>") and wrote.endswith("</tool_call>done")
        assert "tool_response" not in wrote and "tool_response" in bytes(t for t in tokens_T if t < 256).decode()
    folders = env.folders  # type: ignore[attr-defined]  # Echoes
    assert len(set(folders)) == 2 and not any(os.path.exists(one) for one in folders)  # noqa: ASYNC240 - nothing else runs


@pytest.mark.anyio
async def test_a_turn_counts_less_for_each_turn_after_it() -> None:
    with serving(Sampler(policy(lambda place: ("good", "bad")[place]))) as sampler:
        group = await group_of(made(sampler, discount_factor=0.5))
    for score, masks_T, advantages_T in zip(group["scores"], group["masks"], group["advantages"], strict=True):
        by_turn: dict[int, set[float]] = {}
        for turn, advantage in zip(turn_of_token(masks_T), advantages_T, strict=True):
            by_turn.setdefault(turn, set()).add(advantage)
        assert by_turn == {-1: {0.0}, 0: {(score - 0.5) / 2}, 1: {score - 0.5}}


def test_without_a_discount_all_turns_have_the_whole_advantage() -> None:
    masks = [[MASKED, 5, 6, MASKED, 7], [MASKED, 5, MASKED, MASKED, MASKED]]
    assert turn_of_token(masks[0]) == [-1, 0, 0, -1, 1]
    assert discounted_advantages([1.0, 0.0], masks, 1.0) == [[0, 0.5, 0.5, 0, 0.5], [0, -0.5, 0, 0, 0]]


@pytest.mark.anyio
async def test_the_asked_share_of_rollouts_is_sampled_warmer_and_says_so() -> None:
    with serving(Sampler(policy(lambda place: "good"))) as sampler:
        env = made(sampler, group_size=3, explore_temperature_share=0.5, explore_temperature=1.7)
        first, _ = await env.collect_trajectories("good")
        second = await group_of(env)
        asked = {request["temperature"] for request in sampler.requests}
    assert isinstance(first, dict)
    warm = [sum(one["temperature"] == 1.7 for one in group["overrides"] or ()) for group in (first, second)]
    assert sum(warm) == 3 and asked == {1.0, 1.7}


@pytest.mark.anyio
async def test_groups_that_run_side_by_side_have_the_tools_drawn_for_each() -> None:
    with serving(Sampler(policy(lambda place: "good"))) as sampler:
        env = made(sampler, enabled_toolsets=None, distribution="balanced", toolset_seed=3)
        await asyncio.gather(*(env.collect_trajectories("good") for _ in range(6)))
        again = made(sampler, enabled_toolsets=None, distribution="balanced", toolset_seed=3)
        drawn = [sorted(again.group_tools().toolbox.names()) for _ in range(6)]
        await env.cleanup()
        await env.server.close()
        prompts = [
            bytes(one for one in request["prompt"]["prompt_token_ids"] if one < 256).decode()
            for request in sampler.requests
        ]
    offered = [
        sorted(json.loads(line)["name"] for line in prompt.splitlines() if line.startswith('{"name": "'))
        for prompt in prompts
        if RESULT.decode() not in prompt
    ]
    assert sorted(offered) == sorted(one for one in drawn for _ in range(2))
    assert len({tuple(one) for one in drawn}) > 1


@pytest.mark.anyio
async def test_a_conversation_without_room_for_another_answer_ends_and_is_scored() -> None:
    with serving(Sampler(policy(lambda place: ("good", "bad")[place]))) as sampler:
        env = made(sampler, enabled_toolsets=["terminal"])
        env.trainer_max_tokens = len(await _first_prompt(env, sampler)) + len(CALL) + 20
        group = await group_of(env)
    assert sorted(group["scores"]) == [0.0, 1.0]
    assert all(len(one) < env.trainer_max_tokens for one in group["tokens"])
    assert all(messages[-1]["role"] == "tool" for messages in group["messages"])


@pytest.mark.anyio
async def test_a_conversation_that_fills_the_models_context_ends_and_is_scored() -> None:
    def word(place: int) -> str:
        sampler.statuses.append(400)  # for the next turn
        return "good"

    with serving(Sampler(policy(word), said="This model's maximum context length is 512 tokens.")) as sampler:
        env = made(sampler, enabled_toolsets=["terminal"])
        scored, _ = await env.collect_trajectory("good")
    assert scored is not None and scored["scores"] == 1.0
    assert scored["messages"][-1]["role"] == "tool"
    await env.cleanup()
    await env.server.close()


async def _first_prompt(env: HermesAgentBaseEnv, sampler: Sampler) -> list[int]:
    before, sampler.answer = sampler.answer, lambda prompt, index: [*b"nothing", END_ID]
    await env.collect_trajectory("good")
    sampler.answer = before
    prompt: list[int] = sampler.requests[-1]["prompt"]["prompt_token_ids"]
    return prompt


class Raising(Echoes):
    def compute_reward(self, item: str, result: AgentResult, ctx: ToolContext) -> float:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 1:
            raise KeyError("no such thing")
        return float(self.calls)


@pytest.mark.anyio
async def test_a_reward_that_could_not_be_had_is_no_reward_of_zero() -> None:
    with serving(Sampler(policy(lambda place: "good"))) as sampler:
        assert sorted((await group_of(made(sampler, Raising)))["scores"]) == [2.0, 3.0]


@pytest.mark.anyio
async def test_a_sampler_that_refuses_fails_the_rollouts() -> None:
    refusing = Sampler(policy(lambda place: "good"), statuses=[400] * 20)
    with serving(refusing) as sampler, pytest.raises(RolloutsFailedError, match="no answer in turn 1"):
        await group_of(made(sampler))


@pytest.mark.anyio
async def test_evaluation_runs_the_loop_on_held_out_items_and_leaves_the_training_numbers_alone() -> None:
    seen: list[dict[str, float]] = []
    with serving(Sampler(policy(lambda place: "held"))) as sampler:
        env = made(sampler)
        env.on_metrics(lambda metrics: seen.append(dict(metrics)))
        report = await env.evaluate()
        await env.wandb_log({})
        await group_of(env)
        await env.wandb_log({})
    assert report is not None and not isinstance(report, dict)
    assert report.metrics["eval/percent_correct"] == 0.5 and report.metrics["eval/n_items"] == 2  # type: ignore[union-attr]
    assert {request["temperature"] for request in sampler.requests[:4]} == {0.0}
    assert seen[0] == {} and seen[1]["train/turns"] == 2 and seen[1]["train/tool_calls"] == 1


class HalfRaising(Echoes):
    def compute_reward(self, item: str, result: AgentResult, ctx: ToolContext) -> float:
        if item == "held":
            raise KeyError("no such thing")
        return 1.0


@pytest.mark.anyio
async def test_an_item_of_the_evaluation_that_fails_is_counted_and_costs_no_other() -> None:
    with serving(Sampler(policy(lambda place: "good"))) as sampler:
        env = made(sampler, HalfRaising)
        report = await env.evaluate()
        await env.cleanup()
        await env.server.close()
    assert isinstance(report, EvalReport)
    assert (report.metrics["eval/mean_reward"], report.metrics["eval/failed_items"], len(report.samples)) == (1, 1, 1)


@pytest.mark.anyio
async def test_an_openai_endpoint_calls_tools_its_own_way_and_gives_nothing_to_train_on() -> None:
    app, bodies = FastAPI(), []

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        body = await request.json()
        bodies.append(body)
        function = {"name": "terminal", "arguments": json.dumps({"command": "echo good > said"})}
        message: dict[str, Any] = {"role": "assistant", "content": "All done."}
        if body["messages"][-1]["role"] == "user":
            message = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
        return {"choices": [{"finish_reason": "stop", "message": message}], "usage": {"completion_tokens": 7}}

    with http_server(app) as url:
        config = HermesAgentEnvConfig(
            tokenizer_name=str(TINY),
            group_size=2,
            enabled_toolsets=["terminal"],
            extra_body={"provider": {"zdr": True}},
        )
        env = Echoes(config, [APIServerConfig(base_url=f"{url}/v1", server_type="openai", model_name="m")])
        group = await group_of(env)
    assert group["scores"] == [1.0, 1.0] and group.get("inference_logprobs") is None
    assert env.server.usage().completion_tokens == 28
    assert {body["provider"]["zdr"] for body in bodies} == {True} and bodies[0]["tools"][0]["type"] == "function"
    assert [one["role"] for one in group["messages"][0]] == ["user", "assistant", "tool", "assistant"]
    assert "[TOOL CALL] terminal(" in readable(group["messages"][0])


@pytest.mark.anyio
async def test_calls_that_an_openai_endpoint_leaves_in_the_text_are_carried_out() -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        asked = (await request.json())["messages"][-1]["role"] == "user"
        message = {"role": "assistant", "content": CALL % "good" if asked else "All done."}
        return {"choices": [{"finish_reason": "stop", "message": message}]}

    with http_server(app) as url:
        config = HermesAgentEnvConfig(tokenizer_name=str(TINY), group_size=2, enabled_toolsets=["terminal"])
        env = Echoes(config, [APIServerConfig(base_url=f"{url}/v1", server_type="openai", model_name="m")])
        assert (await group_of(env))["scores"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("enabled_toolsets", ["terminl"], "did you mean 'terminal'"),
        ("distribution", "balancd", "there is no distribution"),
        ("tool_call_parser", "hermess", "There is no tool-call parser"),
        ("terminal_backend", "modal", "not supported here"),
        ("discount_factor", 1.5, "less than or equal to 1"),
        ("mcp_servers", {"x": {}}, "either a command or a url"),
        ("tool_result_overrides", {"terminal": -5}, "greater than 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HermesAgentEnvConfig.model_validate({field: value})


def test_a_class_without_its_two_hooks_is_refused_when_it_is_loaded() -> None:
    class Bare(HermesAgentBaseEnv):
        pass

    with pytest.raises(HookError, match="Bare does not define compute_reward, format_prompt"):
        check_hooks(Bare, "serve")
    check_hooks(Echoes, "serve")

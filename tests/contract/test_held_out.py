"""The evaluation at the end, against a sampler over real HTTP: which questions are asked how, and what is concluded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from env_rig import END_ID, TINY, Sampler, serving

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem, is_held_out
from environments.gsm8k_tinker import Gsm8kConfig, Gsm8kEnv
from hermes_rl_mcp.contracts.evaluation import answers_wanted
from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Completion, ScoredDataItem, Session
from hermes_rl_mcp.envs.held_out import HeldOut
from hermes_rl_mcp.files import now
from hermes_rl_mcp.paths import RunPaths, bundled_environments

pytestmark = pytest.mark.anyio


class TwoPolicies(Sampler):
    """Answers in words as the base, with the number alone as the adapter, version 7."""

    ignores_adapter = False

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        base = body.get("adapter") is False and not self.ignores_adapter
        sum_ = bytes(one for one in body["prompt"]["prompt_token_ids"] if one < 256).decode().split("=")[0]
        left, right = (int("".join(c for c in part if c.isdigit())) for part in sum_.split("+"))
        text = f"It is {left + right}" if base else str(left + right)
        self.answer = lambda prompt, index: [*text.encode(), END_ID]
        return {**super()._vllm(body), "policy_version": 0 if base else 7}


@pytest.fixture
def sampler() -> TwoPolicies:
    return TwoPolicies()


@pytest.fixture
async def environment(sampler: TwoPolicies) -> AsyncIterator[ArithmeticEnv]:
    with serving(sampler):
        made = ArithmeticEnv(config(), servers(sampler))
        await made.setup()
        yield made
        await made.server.close()


def config(**values: Any) -> ArithmeticConfig:
    return ArithmeticConfig(max_token_length=12, tokenizer_name=str(TINY), **{"eval_items": 40, **values})


def servers(sampler: Sampler) -> list[APIServerConfig]:
    return [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")]


async def evaluated(environment: BaseEnv, folder: Path) -> Evaluation:
    held_out = HeldOut(environment, folder, ["secret-prefix"])
    await held_out.plan(total_steps=60, batch_size=64)
    if not RunPaths(folder).evaluation.exists():
        await held_out.run()
    return Evaluation.model_validate_json(RunPaths(folder).evaluation.read_text())


async def test_both_sides_get_the_same_held_out_questions_with_the_same_seeds_and_the_verdict_is_theirs(
    environment: ArithmeticEnv, sampler: TwoPolicies, tmp_path: Path
) -> None:
    found = await evaluated(environment, tmp_path)
    base = [request for request in sampler.requests if request.get("adapter") is False]
    adapter = [request for request in sampler.requests if "adapter" not in request]
    assert len(base) == len(adapter) == 40
    assert all(request["evaluation"] is True for request in sampler.requests)
    assert {request["temperature"] for request in sampler.requests} == {1.0}
    asked = [
        Counter((request["seed"], tuple(request["prompt"]["prompt_token_ids"])) for request in side)
        for side in (base, adapter)
    ]
    assert asked[0] == asked[1]
    assert len({seed for seed, _ in asked[0]}) == 40
    assert set(Counter(prompt for _, prompt in asked[0]).values()) == {4}

    assert (found.status, found.items, found.repeats, found.left_out, found.measure) == (
        *("completed", 10, 4, 0),
        "accuracy",
    )
    assert found.base is not None and found.adapter is not None
    assert (found.base.accuracy, found.base.policy_version) == (0.0, 0)
    assert (found.adapter.accuracy, found.adapter.policy_version) == (1.0, 7)
    assert found.difference == 1.0
    assert found.verdict == f"improved by 1.00, 95% interval {found.low:.2f} to 1.00"
    assert found.seconds > 0 and found.time


async def test_two_like_policies_show_no_change(environment: ArithmeticEnv, tmp_path: Path) -> None:
    class Same(ArithmeticEnv):
        def score_answer(self, item: Problem, completion: Completion) -> Any:
            return float("8" in completion.text)

        async def evaluate_item(self, item: Problem) -> Any:
            return await BaseEnv.evaluate_item(self, item)

    same = Same(environment.config, environment.server_configs)
    found = await evaluated(same, tmp_path)
    await same.server.close()
    assert found.measure == "score"
    assert found.base is not None and found.adapter is not None and found.base.accuracy == found.adapter.accuracy > 0
    assert found.verdict.startswith("no detectable change (difference 0.00, 95% interval -0.")


async def test_a_sampler_that_cannot_switch_the_adapter_off_gives_no_result(
    environment: ArithmeticEnv, sampler: TwoPolicies, tmp_path: Path
) -> None:
    sampler.ignores_adapter = True
    found = await evaluated(environment, tmp_path)
    assert (found.status, found.base, found.verdict) == ("failed", None, "")
    assert "policy version 7 where the base (version 0) was asked for" in found.reason


class Guessing(BaseEnv):
    """Two turns, and whatever a test sets."""

    env_config_cls = BaseEnvConfig
    items: Any = tuple(range(40))
    broken = 0

    async def get_eval_items(self, count: int) -> Any:
        if isinstance(self.items, Exception):
            raise self.items
        return self.items

    async def collect_trajectory(self, item: Any) -> tuple[ScoredDataItem | None, list[Any]]:
        if item < self.broken:
            raise ValueError(f"cannot score, see secret-prefix/{item}")
        session: Session = self.server.session([{"role": "user", "content": f"{item}+1="}], max_tokens=12)
        await session.reply()
        session.add({"role": "user", "content": "2+2="})
        await session.reply()
        return session.trajectory.item(0.25 if session.trajectory.last.policy_version else 0.75), []


async def guessing(sampler: TwoPolicies, folder: Path, **attributes: Any) -> Evaluation:
    with serving(sampler):
        values = BaseEnvConfig(tokenizer_name=str(TINY), eval_items=40)
        environment = Guessing(values, servers(sampler))
        for name, value in attributes.items():
            setattr(environment, name, value)
        try:
            return await evaluated(environment, folder)
        finally:
            await environment.server.close()


async def test_an_environment_with_its_own_rollouts_is_evaluated_by_them_every_turn_with_its_own_seed(
    sampler: TwoPolicies, tmp_path: Path
) -> None:
    found = await guessing(sampler, tmp_path)
    assert found.verdict.startswith("got worse by 0.50, 95% interval ")
    assert found.measure == "score"
    seeds = Counter(request["seed"] for request in sampler.requests)
    assert len(sampler.requests) == 160
    assert set(seeds.values()) == {2}, "each seed on both sides, and on no other turn"


async def test_a_few_lost_answers_are_left_out_on_both_sides_and_counted(sampler: TwoPolicies, tmp_path: Path) -> None:
    found = await guessing(sampler, tmp_path, broken=4)
    assert (found.status, found.items, found.left_out) == ("completed", 40, 4)


async def test_many_lost_answers_give_no_result_and_the_reason_holds_no_secret(
    sampler: TwoPolicies, tmp_path: Path
) -> None:
    found = await guessing(sampler, tmp_path, broken=5)
    assert found.status == "failed"
    assert "5 of 40 answers failed" in found.reason and "cannot score" in found.reason
    assert "secret-prefix" not in found.reason


@pytest.mark.parametrize(
    ("items", "status", "words"),
    [
        (None, "skipped", "names no held-out items"),
        ([], "skipped", "names no held-out items"),
        (OSError("no file"), "failed", "OSError: no file"),
    ],
    ids=["none", "empty", "error"],
)
async def test_without_held_out_items_the_reason_is_there_before_training_begins(
    sampler: TwoPolicies, tmp_path: Path, items: Any, status: str, words: str
) -> None:
    found = await guessing(sampler, tmp_path, items=items)
    assert found.status == status and words in found.reason
    assert sampler.requests == []


async def test_an_evaluation_that_is_ended_says_how_far_it_was(
    environment: ArithmeticEnv, sampler: TwoPolicies, tmp_path: Path
) -> None:
    held_out = HeldOut(environment, tmp_path)
    await held_out.plan(60, 64)
    begun = asyncio.Event()
    scored = environment.score_answer

    def score(item: Problem, completion: Completion) -> Any:
        begun.set()
        return scored(item, completion)

    environment.score_answer = score  # type: ignore[method-assign]
    sampler.delay_s = 0.2
    running = asyncio.create_task(held_out.run())
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    found = Evaluation.model_validate_json(RunPaths(tmp_path).evaluation.read_text())
    assert found.status == "failed" and "of 40 answers)" in found.reason


async def test_it_is_due_only_once_the_trainer_has_completed_and_waits(
    environment: ArithmeticEnv, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path)
    paths.evaluation.write_text("{}")  # of an earlier attempt in this folder
    held_out = HeldOut(environment, tmp_path)
    await held_out.plan(60, 64)
    assert not paths.evaluation.exists()
    assert not held_out.due()
    for status, stays_s in (("failed", 9.0), ("completed", 0.0), ("completed", 9.0)):
        report = {"process": "trainer", "status": status, "step": 60, "finished_at": now(), "stays_s": stays_s}
        paths.report("trainer").write_text(ChildReport.model_validate(report).model_dump_json())
        assert held_out.due() is (status == "completed" and stays_s > 0)


@pytest.mark.parametrize(
    ("sizes", "wanted", "reason"),
    [
        ((-1, 60, 64), 192, ""),
        ((-1, 2500, 128), 200, ""),
        ((-1, 2, 32), 0, "2 steps of 32 answers sample allows 3 items"),
        ((-1, 9, 64), 0, "fewer than 30"),
        ((-1, 10, 64), 32, ""),
        ((0, 2500, 128), 0, "eval_items = 0"),
        ((1000, 1, 8), 1000, ""),
        ((4, 60, 64), 0, "too few"),
    ],
)
def test_as_many_answers_as_a_tenth_of_the_run_unless_told_otherwise(
    sizes: tuple[int, int, int], wanted: int, reason: str
) -> None:
    found, why = answers_wanted(*sizes)
    assert found == wanted
    assert reason in why


async def test_held_out_items_of_the_bundled_environments_are_never_trained_on() -> None:
    for difficulty in (1, 2, 4):
        arithmetic = ArithmeticEnv(config(difficulty=difficulty), [])
        await arithmetic.setup()
        items = await arithmetic.get_eval_items(200)
        assert items and items == await arithmetic.get_eval_items(200) and all(map(is_held_out, items))
        trained = {(await arithmetic.get_next_item()).text for _ in range(2000)}
        assert not trained & {item.text for item in items}
    gsm8k = Gsm8kEnv(Gsm8kConfig(data_dir=str(bundled_environments() / "gsm8k_sample")), [])
    await gsm8k.setup()
    gsm8k.test[3] = gsm8k.train[0]  # a question that both splits have
    tests = await gsm8k.get_eval_items(1000)
    assert len(tests) == len(gsm8k.test) - 1
    assert not {problem.question for problem in gsm8k.train} & {problem.question for problem in tests}
    assert [problem.question for problem in await gsm8k.get_eval_items(5)] == [one.question for one in tests[:5]]

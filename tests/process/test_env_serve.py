"""An environment process in a run: feeds the trainer, keeps its limits, outlives its peers, says how it failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from env_rig import (
    TINY,
    Api,
    EnvProcess,
    Sampler,
    child_environ,
    json_lines,
    run_env,
    serving,
    until,
    write_config,
    write_env,
)

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB, SequenceNotes
from hermes_rl_mcp.contracts.runs import ChildReport

GROUP, BATCH = 2, 4


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with serving(Sampler()) as running:
        yield running


@pytest.fixture(scope="module")
def one_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One process for all tests of this file; starting one takes longer than most of them."""
    server = Api(tmp_path_factory.mktemp("api"), child_environ(dict(os.environ)))
    server.start()
    yield server
    server.close()


@pytest.fixture
def api(one_api: Api) -> Api:
    one_api.reset()
    return one_api


Start = Callable[..., EnvProcess]


@pytest.fixture
def start(tmp_path: Path, environ: dict[str, str], api: Api, sampler: Sampler) -> Iterator[Start]:
    """``start(extra="lines of the class", **env fields)``: the counting environment, serving."""
    started: list[EnvProcess] = []

    def run(extra: str = "", server_type: str = "vllm", **fields: Any) -> EnvProcess:
        env = {
            "group_size": GROUP,
            "batch_size": BATCH,
            "max_batches_offpolicy": 1,
            "max_token_length": 8,
            "tokenizer_name": str(TINY),
            "rollout_server_url": api.url,
            "total_steps": 50,
            "steps_per_eval": -1,
            "ensure_scores_are_not_same": False,
            "use_wandb": False,
            **fields,
        }
        config = write_config(tmp_path, env, {"base_url": f"{sampler.url}/v1", "server_type": server_type})
        spec = f"{write_env(tmp_path, extra)}:CountingEnv"
        started.append(run_env(tmp_path, child_environ(environ), spec, "serve", "--config", str(config)))
        return started[-1]

    yield run
    for process in started:
        process.stop()


def test_the_trainer_gets_whole_aligned_groups_and_no_more_than_it_needs(
    tmp_path: Path, api: Api, sampler: Sampler, start: Start
) -> None:
    env = start(total_steps=3, min_items_sent_before_logging=0)
    api.register_trainer(batch_size=BATCH)
    groups = [group for _ in range(3) for group in api.next_batch()]
    assert len(groups) == 3 * BATCH // GROUP
    for group in groups:
        assert len(group["tokens"]) == GROUP
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            prompt = len(tokens) - 2
            assert masks == [MASKED] * prompt + tokens[prompt:]
            assert logprobs == [NO_LOGPROB] * prompt + [-1 / 64, -2 / 64]
        notes = [SequenceNotes.model_validate(one) for one in group["overrides"]]
        assert {(n.policy_version, n.finish_reason, n.reward_parts["correct"]) for n in notes} == {(3, "stop", 1.0)}
        assert group["generation_params"] == {"temperature": 1.0, "policy_version": 3}
        assert group["messages"] is None
    assert len({json.dumps(group["group_overrides"]) for group in groups}) == len(groups)
    # Everything was sent: the environment idles, but stays until it is told to go.
    until(lambda: [line for line in json_lines(tmp_path / "env_metrics.jsonl") if line["step"] == 3])
    end = time.monotonic() + 0.5  # having seen that step, it would begin further groups at once
    while time.monotonic() < end:
        assert api.received() == len(groups)
    assert api.take() is None
    assert env.process.poll() is None
    assert env.stop() == 0
    assert api.health()["environments"] == 0
    assert api.received() == len(groups)
    lines = json_lines(tmp_path / "env_metrics.jsonl")
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert {line.get("train/percent_correct", 1.0) for line in lines} == {1.0}
    assert lines[-1]["groups/sent"] == len(groups)
    assert not (tmp_path / "report_env.json").exists()


def test_with_one_batch_off_policy_the_queue_never_holds_more_than_one(api: Api, start: Start) -> None:
    start(max_num_workers=16)
    api.register_trainer(batch_size=BATCH)
    per_batch = BATCH // GROUP
    until(lambda: api.received() >= per_batch)
    for taken in range(1, 6):
        # Between two batches the environment has time to overshoot: it looks at the queue ten times a second.
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            assert api.received() <= taken * per_batch
        assert len(api.next_batch()) == per_batch


def test_while_the_last_batch_is_trained_no_further_group_is_made(api: Api, sampler: Sampler, start: Start) -> None:
    env = start(total_steps=1, max_batches_offpolicy=2)
    api.register_trainer(batch_size=BATCH)
    lease_id = until(api.lease, why=lambda: env.text)
    end = time.monotonic() + 0.5  # the environment looks at the queue ten times a second
    while time.monotonic() < end:
        assert len(sampler.requests) == api.received() == BATCH // GROUP
    api.acknowledge(lease_id)


def test_it_waits_for_a_trainer_that_comes_later(api: Api, start: Start) -> None:
    env = start()
    until(lambda: "waiting for the trainer" in env.text)
    assert api.health()["environments"] == 0
    api.register_trainer(batch_size=BATCH)
    assert len(api.next_batch()) == BATCH // GROUP


def test_a_restart_of_the_rollout_api_is_survived(api: Api, start: Start) -> None:
    env = start()
    api.register_trainer(batch_size=BATCH)
    api.next_batch()
    api.kill()
    api.start()
    api.register_trainer(batch_size=BATCH)
    assert len(api.next_batch()) == BATCH // GROUP
    assert env.process.poll() is None
    assert "registering again" in env.text


def test_a_rollout_that_fails_is_replaced_and_its_group_is_whole(tmp_path: Path, api: Api, start: Start) -> None:
    extra = """
    def score_answer(self, item, completion):
        self.scored += 1
        if self.scored % 3 == 0:
            raise RuntimeError("now and then")
        return 1.0
"""
    env = start(extra, min_items_sent_before_logging=0)
    api.register_trainer(batch_size=BATCH)
    for _ in range(3):
        assert all(len(group["tokens"]) == GROUP for group in api.next_batch())
    until(lambda: json_lines(tmp_path / "env_metrics.jsonl"))
    assert json_lines(tmp_path / "env_metrics.jsonl")[-1]["groups/failed"] == 0.0
    assert "sampling a replacement: RuntimeError: now and then" in env.text


def test_single_rollouts_are_gathered_and_a_failed_one_is_run_again(api: Api, start: Start) -> None:
    extra = """
    async def collect_trajectory(self, item):
        self.scored += 1
        if self.scored % 3 == 0:
            raise RuntimeError("now and then")
        session = self.server.session(self.get_messages(item), max_tokens=8)
        await session.reply()
        session.add({"role": "user", "content": "again"})
        await session.reply()
        return session.trajectory.item(float(item), {"turns": 2.0}), []
"""
    start(extra)
    api.register_trainer(batch_size=BATCH)
    for group in api.next_batch():
        assert len(group["tokens"]) == GROUP
        assert [sum(mask != MASKED for mask in masks) for masks in group["masks"]] == [4, 4]
        assert group["overrides"][0]["reward_parts"] == {"turns": 2.0}


def test_a_failing_metrics_hook_and_a_dry_spell_do_not_end_it(api: Api, start: Start) -> None:
    extra = """
    async def wandb_log(self, metrics=None):
        raise RuntimeError("no chart today")

    async def get_next_item(self):
        self.count += 1
        return None if self.count in (3, 4, 5) else self.count
"""
    env = start(extra, min_items_sent_before_logging=0)
    api.register_trainer(batch_size=BATCH)
    for _ in range(3):
        api.next_batch()
    until(lambda: "RuntimeError: no chart today" in env.text)
    assert env.text.count("nothing at the moment") == 1
    assert env.process.poll() is None


def failed(env: EnvProcess, folder: Path) -> ChildReport:
    until(lambda: env.process.poll() is not None, why=lambda: env.text)
    assert env.process.returncode == 1, env.text
    return ChildReport.model_validate_json((folder / "report_env.json").read_text())


def test_an_environment_that_only_fails_ends_and_quotes_the_first_error(tmp_path: Path, api: Api, start: Start) -> None:
    extra = """
    async def collect_trajectories(self, item):
        raise ValueError(f"item {item} is broken")
"""
    api.register_trainer(batch_size=64)
    report = failed(start(extra, max_num_workers=8), tmp_path)
    assert (report.process, report.status) == ("env", "failed")
    assert "ValueError: item 1 is broken" in (report.error or "")


def test_an_environment_that_throws_many_groups_away_goes_on(tmp_path: Path, api: Api, start: Start) -> None:
    extra = """
    async def collect_trajectories(self, item):
        from hermes_rl_mcp.envs.groups import REJECTED, BadGroupError
        self.thrown = getattr(self, "thrown", 0) + 1
        if self.thrown <= 30:
            raise BadGroupError(REJECTED, "nothing to learn from")
        return await super().collect_trajectories(item)
    """
    env = start(extra, total_steps=1)
    api.register_trainer(batch_size=BATCH)
    assert len(api.next_batch()) == BATCH // GROUP
    until(lambda: json.loads((tmp_path / "env_state.json").read_text())["dropped"] == 30)
    assert env.process.poll() is None


def test_an_environment_that_ends_its_own_process_is_reported_with_what_it_did(
    tmp_path: Path, api: Api, start: Start
) -> None:
    api.register_trainer(batch_size=64)
    report = failed(start("\n    def score_answer(self, item, completion):\n        raise SystemExit(3)\n"), tmp_path)
    assert "sys.exit(3)" in (report.error or "")


def test_groups_that_take_too_long_count_as_failed(tmp_path: Path, api: Api, sampler: Sampler, start: Start) -> None:
    sampler.delay_s = 60
    api.register_trainer(batch_size=64)
    report = failed(start(worker_timeout=0.2, max_num_workers=32, batch_size=64), tmp_path)
    assert "worker_timeout = 0.2 s" in (report.error or "")


def test_a_failing_setup_is_reported(tmp_path: Path, start: Start) -> None:
    report = failed(start("\n    async def setup(self):\n        raise KeyError('no data')\n"), tmp_path)
    assert "KeyError" in (report.error or "")


def test_a_tokenizer_that_is_not_there_is_reported_before_anything_is_sampled(
    tmp_path: Path, api: Api, start: Start
) -> None:
    report = failed(start(tokenizer_name=str(tmp_path / "nowhere")), tmp_path)
    assert "nowhere" in (report.error or "")
    assert api.health()["environments"] == 0


def test_text_only_endpoints_are_refused_for_training(tmp_path: Path, start: Start) -> None:
    report = failed(start(server_type="openai"), tmp_path)
    assert "server_type openai" in (report.error or "")
    assert "process" in (report.hint or "")


def test_sizes_that_form_no_batch_are_refused(tmp_path: Path, api: Api, start: Start) -> None:
    api.register_trainer(batch_size=BATCH)
    report = failed(start(group_size=3), tmp_path)
    assert "group_size" in (report.error or "")


def test_evaluation_runs_at_its_interval_and_has_the_sampler_for_itself(
    tmp_path: Path, api: Api, sampler: Sampler, start: Start
) -> None:
    start(steps_per_eval=2, data_dir_to_save_evals=str(tmp_path / "evals"))
    api.register_trainer(batch_size=BATCH)
    api.next_batch()
    assert not evaluations(sampler)
    api.next_batch()
    until(lambda: evaluations(sampler))
    lines = until(lambda: [one for one in json_lines(tmp_path / "env_metrics.jsonl") if "eval/length" in one])
    assert [(line["step"], line["eval/length"]) for line in lines] == [(2, 1.0)]
    assert json.loads((tmp_path / "evals" / "step_2" / "metrics.json").read_text())["results"]["all"] == {"length": 1.0}
    api.next_batch()
    api.next_batch()
    until(lambda: len(evaluations(sampler)) == 2)


def test_an_evaluation_that_does_not_end_is_given_up_and_training_goes_on(
    api: Api, sampler: Sampler, start: Start
) -> None:
    extra = """
    async def evaluate(self):
        import asyncio
        await asyncio.Event().wait()
"""
    env = start(extra, steps_per_eval=1, eval_timeout=0.3)
    api.register_trainer(batch_size=BATCH)
    for _ in range(3):
        api.next_batch()
    until(lambda: "it took longer than eval_timeout = 0.3 s" in env.text)


def test_a_group_that_shrank_is_taken(api: Api, start: Start) -> None:
    extra = """
    async def collect_trajectory(self, item):
        self.scored += 1
        if self.scored % 4 == 0:
            raise RuntimeError("now and then")
        [trajectory] = await self.server.chat(self.get_messages(item), max_tokens=8)
        return await self.score(item, trajectory), []
"""
    start(extra, group_size=4, batch_size=12, on_failed_rollout="shrink", max_num_workers=1)
    api.register_trainer(batch_size=12)
    assert [len(group["tokens"]) for group in api.next_batch()] == [3, 3, 3, 3]


def evaluations(sampler: Sampler) -> list[dict[str, Any]]:
    return [request for request in sampler.requests if request["temperature"] == 0.0]

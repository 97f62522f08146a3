"""Hooks at work in a serving environment: evaluation beside training, items that fail, what is kept for people."""

from __future__ import annotations

import json
import os
import signal
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
    say,
    serving,
    until,
    write_config,
    write_env,
)
from fastapi import Request

GROUP, BATCH = 2, 16


class Counting(Sampler):
    """Knows how many requests of the training were under way at once."""

    under_way = peak = 0

    async def _arrived(self, request: Request) -> dict[str, Any]:
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
            return await super()._arrived(request)
        finally:
            self.under_way -= 1


@pytest.fixture
def sampler() -> Iterator[Counting]:
    with serving(Counting(answer=say("8"))) as running:
        assert isinstance(running, Counting)
        yield running


@pytest.fixture(scope="module")
def one_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
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
def start(tmp_path: Path, environ: dict[str, str], api: Api, sampler: Counting) -> Iterator[Start]:
    """``start("lines of the class", **env fields)``: the counting environment, serving."""
    started: list[EnvProcess] = []

    def run(extra: str = "", **fields: Any) -> EnvProcess:
        env = {
            **{"group_size": GROUP, "batch_size": BATCH, "max_batches_offpolicy": 3, "max_token_length": 8},
            **{"tokenizer_name": str(TINY), "rollout_server_url": api.url, "total_steps": 50, "steps_per_eval": -1},
            **{"ensure_scores_are_not_same": False, "use_wandb": False, "min_items_sent_before_logging": 0},
            **fields,
        }
        config = write_config(tmp_path, env, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
        spec = f"{write_env(tmp_path, extra)}:CountingEnv"
        started.append(run_env(tmp_path, child_environ(environ), spec, "serve", "--config", str(config)))
        return started[-1]

    yield run
    for process in started:
        process.stop()


EVALUATES_UNTIL_TOLD = """
    async def evaluate(self):
        import asyncio
        from pathlib import Path
        Path("{folder}/evaluating").touch()
        while not Path("{folder}/go").exists():
            await asyncio.sleep(0.02)
        return {{"eval/done": 1.0}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("handling", "most"), [("STOP_TRAIN", 0), ("LIMIT_TRAIN", 2), ("NONE", 4)])
def test_training_goes_on_beside_an_evaluation_as_far_as_eval_handling_says(
    tmp_path: Path, api: Api, sampler: Counting, start: Start, handling: str, most: int
) -> None:
    sampler.delay_s = 0.1
    extra = EVALUATES_UNTIL_TOLD.format(folder=tmp_path)
    env = start(extra, steps_per_eval=1, eval_handling=handling, eval_limit_ratio=0.5, max_num_workers=4)
    api.register_trainer(batch_size=BATCH)
    api.next_batch()
    until((tmp_path / "evaluating").exists, 120, why=lambda: env.text)
    until(lambda: sampler.under_way <= most, 120)  # what was under way before
    sampler.delay_s = 1.0  # long enough for all of them to overlap
    sampler.peak, before, asked = 0, api.received(), len(sampler.requests)
    if most:
        until(lambda: api.received() >= before + 4 and sampler.peak >= most, 120, why=lambda: env.text)
        assert sampler.peak == most
    else:
        with pytest.raises(AssertionError, match="did not happen"):
            until(lambda: len(sampler.requests) > asked, timeout_s=1.5)
    (tmp_path / "go").touch()
    until(lambda: any("eval/done" in line for line in json_lines(tmp_path / "env_metrics.jsonl")), 120)
    until(lambda: api.received() > before, 120, why=lambda: env.text)


@pytest.mark.slow
def test_items_that_fail_now_and_then_are_counted_and_the_run_goes_on(tmp_path: Path, api: Api, start: Start) -> None:
    extra = """
    async def get_next_item(self):
        self.count += 1
        if self.count == 2:
            raise KeyError("no such row")
        if self.count == 4:
            import asyncio
            await asyncio.Event().wait()
        return self.count
"""
    env = start(extra, worker_timeout=2)
    api.register_trainer(batch_size=BATCH)
    assert len(api.next_batch()) == BATCH // GROUP
    lines = until(lambda: [one for one in json_lines(tmp_path / "env_metrics.jsonl") if one["groups/failed"] >= 2])
    assert lines[-1]["groups/failed"] == 2
    assert "KeyError: 'no such row' (" in env.text and "counting_env.py:" in env.text
    assert "get_next_item() gave nothing within worker_timeout = 2 s" in env.text


def test_what_was_sent_is_processed_kept_for_people_and_timed(tmp_path: Path, api: Api, start: Start) -> None:
    extra = """
    async def postprocess_histories(self, groups):
        return {**groups, "scores": [score + 1 for score in groups["scores"]]}

    async def cleanup(self):
        raise RuntimeError("nothing to clean")
"""
    fields = {"data_path_to_save_groups": str(tmp_path / "groups.jsonl"), "num_rollouts_to_keep": 3}
    env = start(extra, num_rollouts_per_group_for_logging=-1, **fields)
    api.register_trainer(batch_size=BATCH)
    groups = api.next_batch()
    assert {score for group in groups for score in group["scores"]} == {2.0}
    table = tmp_path / "env_rollouts.jsonl"
    until(table.exists, why=lambda: env.text)
    rows = json_lines(table)
    assert len(rows) <= 3 * GROUP and {row["score"] for row in rows} == {2.0}
    assert rows[0]["text"].endswith("8<|end|>")
    line = json_lines(tmp_path / "env_metrics.jsonl")[-1]
    assert line["train_perf/task_duration_max"] >= line["train_perf/succeeded_task_duration_min"] > 0
    assert line["server/server_0_request_time_99p"] >= line["server/server_0_request_time_avg"] > 0
    assert env.stop() == 0, env.text  # what cleanup raises is said, and is no failure of the run
    assert "RuntimeError: nothing to clean" in env.text
    assert not (tmp_path / "report_env.json").exists()
    saved = json_lines(tmp_path / "groups.jsonl")
    assert len(saved) >= len(groups) and saved[0]["scores"] == [2.0, 2.0]


def test_an_order_to_stop_while_it_sets_up_is_no_exit_of_its_own(tmp_path: Path, start: Start) -> None:
    env = start(
        """
    async def setup(self):
        import asyncio, logging
        logging.warning("setting up")
        await asyncio.sleep(60)
"""
    )
    until(lambda: "setting up" in env.text)
    assert env.stop() == 0
    assert not (tmp_path / "report_env.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("raised", ["sys.exit(0)", "KeyboardInterrupt"])
def test_an_environment_that_leaves_by_itself_is_reported_with_the_line(
    tmp_path: Path, api: Api, start: Start, raised: str
) -> None:
    what = "SystemExit(0)" if "exit" in raised else raised
    env = start(f"\n    def score_answer(self, item, completion):\n        raise {what}\n")
    api.register_trainer(batch_size=BATCH)
    until(lambda: env.process.poll() is not None, why=lambda: env.text)
    assert env.process.returncode == (1 if "exit" in raised else 128 + signal.SIGINT)
    report = json.loads((tmp_path / "report_env.json").read_text())
    assert raised in report["error"] and "counting_env.py:" in report["error"]

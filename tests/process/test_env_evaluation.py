"""An environment process after the last step: it evaluates once the trainer has completed, and not before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from env_rig import TINY, Api, EnvProcess, Sampler, child_environ, run_env, serving, until, write_config, write_env
from fastapi import Request

from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.paths import RunPaths

HELD_OUT = """
    async def get_eval_items(self, count):
        return [f"held out {number}" for number in range(count)]
"""


class Versions(Sampler):
    hold = False
    """Answers the first question of an evaluation, and the others once this is over."""

    async def _arrived(self, request: Request) -> dict[str, Any]:
        body = await super()._arrived(request)
        asked = sum(bool(one.get("evaluation")) for one in self.requests)
        while self.hold and asked > 1:  # noqa: ASYNC110 - set by the test, in another thread
            await anyio.sleep(0.02)
        return body

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super()._vllm(body), "policy_version": 0 if body.get("adapter") is False else 1}


@pytest.fixture
def sampler() -> Iterator[Versions]:
    with serving(Versions()) as running:
        assert isinstance(running, Versions)
        yield running


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    server = Api(tmp_path, child_environ(dict(os.environ)))
    server.start()
    yield server
    server.close()


@pytest.fixture
def env(tmp_path: Path, environ: dict[str, str], api: Api, sampler: Versions) -> Iterator[EnvProcess]:
    """One step, then eight held-out items."""
    fields = {
        **{"group_size": 2, "batch_size": 4, "total_steps": 1, "max_token_length": 8, "eval_items": 8},
        **{"tokenizer_name": str(TINY), "rollout_server_url": api.url, "steps_per_eval": -1, "use_wandb": False},
        "ensure_scores_are_not_same": False,
    }
    config = write_config(tmp_path, fields, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
    spec = f"{write_env(tmp_path, HELD_OUT)}:CountingEnv"
    process = run_env(tmp_path, child_environ(environ), spec, "serve", "--config", str(config))
    yield process
    process.stop()


def complete(paths: RunPaths) -> None:
    """As the trainer does after its last step."""
    report = ChildReport(process="trainer", status="completed", step=1, finished_at=now(), stays_s=60)
    write_atomic(paths.report("trainer"), report.model_dump_json())


def test_it_evaluates_when_the_trainer_has_completed_says_how_far_it_is_and_stays(
    tmp_path: Path, api: Api, sampler: Versions, env: EnvProcess
) -> None:
    paths = RunPaths(tmp_path)
    api.register_trainer(batch_size=4, num_steps=1)
    api.next_batch()
    until(lambda: json.loads(paths.env_state.read_text())["running"] == 0 if paths.env_state.exists() else False)
    assert not any(request.get("evaluation") for request in sampler.requests)
    sampler.hold = True
    complete(paths)
    until(lambda: "base: 1 of 8" in json.loads(paths.env_state.read_text())["evaluating"], why=lambda: env.text)
    sampler.hold = False
    until(paths.evaluation.exists, why=lambda: env.text)
    found = Evaluation.model_validate_json(paths.evaluation.read_text())
    assert (found.status, found.items, found.step, found.difference) == ("completed", 8, 1, 0.0)
    assert found.verdict.startswith("no detectable change")
    until(lambda: json.loads(paths.env_state.read_text())["evaluating"] == "")
    assert env.process.poll() is None
    assert env.stop() == 0


def test_an_order_to_stop_ends_the_evaluation_with_a_word(
    tmp_path: Path, api: Api, sampler: Versions, env: EnvProcess
) -> None:
    paths = RunPaths(tmp_path)
    api.register_trainer(batch_size=4, num_steps=1)
    api.next_batch()
    sampler.delay_s = 60
    complete(paths)
    until(lambda: any(request.get("evaluation") for request in sampler.requests), why=lambda: env.text)
    assert env.stop() == 0
    found = Evaluation.model_validate_json(paths.evaluation.read_text())
    assert found.status == "failed" and "ended before it was done" in found.reason

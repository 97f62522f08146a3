"""On-policy and asynchronous: both lift the reward of the embedded model, and the files say how old each answer was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from three_processes import run_directory

STEPS = 40
READY_S, RUN_S = 120.0, 500.0


def _version_before(lines: list[dict[str, Any]], step: int) -> int:
    return int(lines[step - 2]["policy/version"]) if step > 1 else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("allowed", [0, 2])
def test_the_reward_rises_and_no_answer_is_older_than_allowed(
    tmp_path: Path, environ: Mapping[str, str], allowed: int
) -> None:
    env = {"total_steps": STEPS, "max_batches_offpolicy": allowed, "seed": 0, "eval_items": 0}
    with run_directory(tmp_path, environ, env=env, trainer={"seed": 0, "rollouts_logged_per_step": 8}) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: run.health().get("status") == "ok", READY_S)
        run.start("env")
        run.wait(lambda: run.paths.report("trainer").exists(), RUN_S, alive="env")
        assert run.report().status == "completed", run.log("trainer")
        lines = run.metrics()
        rollouts = [json.loads(line) for line in run.paths.rollouts.read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    assert len(rewards) == STEPS
    assert fmean(rewards[-5:]) - fmean(rewards[:5]) >= 0.2
    lags = [line["policy/lag"] for line in lines]
    assert max(lags) <= allowed and (allowed == 0 or max(lags) > 0)
    for rollout in rollouts:
        age = _version_before(lines, rollout["step"]) - rollout["policy_version"]
        assert 0 <= age <= allowed, rollout
    assert {rollout["step"] for rollout in rollouts} == set(range(1, STEPS + 1))

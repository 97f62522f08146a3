"""Metrics of a step: exact names, null for what is unknown, files that a reader can follow."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.records import METRIC_NAMES
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from trainer.backends.base import EngineStats
from trainer.backends.training import ForwardBackward, OptimStep, StepResult
from trainer.batching import build_batch
from trainer.metrics import JsonLines, LastEvaluation, Metrics, StepTimes, finite, step_metrics

RESULT = StepResult(
    ForwardBackward(loss=0.25, tokens=4, logprob_mean=-0.9, seconds=0.25, ratio_mean=1.25, ratio_max=3.0),
    OptimStep(grad_norm=2.0, adapter_max_abs=0.01, seconds=0.25),
    policy_version=6,
)


def _group(scores: list[float], overrides: list[dict[str, Any]] | None = None) -> ScoredData:
    size = len(scores)
    return ScoredData(
        tokens=[[1, 2, 3, 4]] * size,
        masks=[[-100, -100, 3, 4]] * size,
        inference_logprobs=[[1.0, 1.0, -0.5, -1.5]] * size,
        scores=scores,
        overrides=overrides,
    )


def _metrics(groups: list[ScoredData], result: StepResult | None = RESULT) -> Metrics:
    return step_metrics(
        build_batch(groups, TrainerConfig(), 50),
        result,
        learning_rate=1e-3 if result else None,
        version_before=5,
        adapter_max_abs=0.01,
        times=StepTimes.between(
            2.0, EngineStats(sampled_tokens=10, sample_s=1.0), EngineStats(sampled_tokens=110, sample_s=1.5)
        ),
        eval_percent_correct=None,
    )


def test_the_names_are_exactly_those_of_the_contract_and_the_reward_parts() -> None:
    notes = [{"reward_parts": {"correct": 1.0, "format": 1.0}}, {"reward_parts": {"correct": 0.0}}]
    values = _metrics([_group([1.0, 0.0], notes)])
    assert set(values) == {*METRIC_NAMES, "reward/correct", "reward/format"}
    assert (values["reward/correct"], values["reward/format"]) == (0.5, 1.0)


def test_values_follow_from_the_batch() -> None:
    notes = [{"policy_version": 5, "finish_reason": "length"}, {"policy_version": 2, "finish_reason": "stop"}]
    values = _metrics([_group([1.0, 0.0], notes), _group([1.0, 1.0])])
    expected = {
        "reward/mean": 0.75,
        "train/reward_mean": 0.75,
        "train/percent_correct": 0.75,
        "groups/zero_variance_fraction": 0.5,
        "logprobs/mean": -1.0,
        "logprobs/mean_training": -0.9,
        "logprobs/diff": -0.1,
        "advantages/mean": 0.0,
        "advantages/std": 0.5,
        "policy/lag": 1.5,
        "policy/version": 6,
        "rollouts/truncated_fraction": 0.5,
        "rollouts/length_mean": 2.0,
        "tokens/trained": 4,
        "time/sample_s": 0.5,
        "tokens/sampled_per_s": 200.0,
        "train/loss": 0.25,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_what_the_pass_found_is_in_the_metrics() -> None:
    found = ForwardBackward(
        loss=0.25,
        tokens=4,
        logprob_mean=-0.9,
        seconds=0.25,
        entropy=1.5,
        clip_fraction=0.125,
        ratio_mean=1.25,
        ratio_max=3.0,
        mismatch_kl=0.01,
        kl_reference=0.2,
        distill_kl=0.3,
    )
    values = _metrics([_group([1.0, 0.0])], replace(RESULT, found=found))
    expected = {
        "train/grad_norm": 2.0,
        "train/entropy": 1.5,
        "train/clip_fraction": 0.125,
        "train/kl_reference": 0.2,
        "train/distill_kl": 0.3,
        "ratio/mean": 1.25,
        "ratio/max": 3.0,
        "logprobs/mismatch_kl": 0.01,
        "time/train_s": 0.5,
    }
    assert {name: values[name] for name in expected} == expected


def test_means_are_over_the_tokens_in_the_loss_alone() -> None:
    """Neither a prompt, nor a sequence that was taken out of the loss, nor a group without signal counts."""
    zeroed = [{}, {}, {"set_advantage_to_zero": True}]
    values = _metrics([_group([1.0, 0.5, 0.0], zeroed), _group([1.0, 1.0])])
    assert (values["advantages/mean"], values["advantages/std"]) == (0.25, 0.25)
    assert (values["logprobs/mean"], values["tokens/trained"]) == (-1.0, 2)


def test_percent_correct_follows_the_correct_part_where_there_is_one() -> None:
    notes = [{"reward_parts": {"correct": 0.0}}, {"reward_parts": {"correct": 1.0}}]
    assert _metrics([_group([0.1, 0.0], notes)])["train/percent_correct"] == 0.5


def test_a_batch_without_signal_has_null_loss_and_the_old_version() -> None:
    values = _metrics([_group([1.0, 1.0])], None)
    for name in ("train/loss", "train/learning_rate", "train/grad_norm", "logprobs/mean", "advantages/mean"):
        assert values[name] is None
    assert (values["policy/version"], values["tokens/trained"], values["reward/mean"]) == (5, 0, 1.0)


def test_what_nobody_knows_is_null() -> None:
    values = _metrics([_group([1.0, 0.0])])
    assert values["policy/lag"] is None
    assert values["rollouts/truncated_fraction"] is None
    assert values["eval/percent_correct"] is None


def test_nan_and_infinity_become_null_and_lines_are_strict_json(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.write([{"step": 1, **finite({"a": math.nan, "b": math.inf, "c": 1.5, "d": None})}])
    file.write([{"step": 2, "text": "ä\nb"}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "a": None, "b": None, "c": 1.5, "d": None},
        {"step": 2, "text": "ä\nb"},
    ]
    with pytest.raises(ValueError, match="JSON compliant"):
        file.write([{"a": math.nan}])


def test_the_last_evaluation_is_followed_and_torn_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "env_metrics.jsonl"
    follower = LastEvaluation(path)
    assert follower.read() is None
    path.write_text('{"step": 1, "eval/percent_correct": 0.25}\n{"step": 2}\nnot json\n{"eval/perc')
    assert follower.read() == 0.25
    with path.open("a") as file:
        file.write('ent_correct": 0.75}\n')
    assert follower.read() == 0.75
    assert follower.read() == 0.75

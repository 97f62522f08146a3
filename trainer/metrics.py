"""The metrics of one step, and the files they go to.

Invariant: every line of ``metrics.jsonl`` has exactly the names of ``METRIC_NAMES`` plus ``reward/<part>``; what is not
known, not finite or does not apply is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from hermes_rl_mcp.contracts.records import METRIC_NAMES
from trainer.backends.base import EngineStats
from trainer.backends.training import StepResult
from trainer.batching import Rollout, TrainingBatch

Metrics = dict[str, float | None]


class StepTimes(BaseModel):
    """Seconds of one step, and what the sampler did since the last one ended."""

    step_s: float
    sample_s: float
    sampled_tokens: int

    @classmethod
    def between(cls, step_s: float, before: EngineStats, after: EngineStats) -> StepTimes:
        return cls(
            step_s=step_s,
            sample_s=after.sample_s - before.sample_s,
            sampled_tokens=after.sampled_tokens - before.sampled_tokens,
        )


def step_metrics(
    batch: TrainingBatch,
    result: StepResult | None,
    *,
    learning_rate: float | None,
    version_before: int,
    adapter_max_abs: float,
    times: StepTimes,
    eval_percent_correct: float | None,
) -> Metrics:
    """All names; ``result`` is None for a batch without signal."""
    rollouts = batch.rollouts
    scores = [rollout.score for rollout in rollouts]
    logprobs, advantages = _trained_values(batch)
    logprob_mean = _mean(logprobs)
    found = result.found if result else None
    training_mean = found.logprob_mean if found else None
    known = [rollout.finish_reason == "length" for rollout in rollouts if rollout.finish_reason]
    lags = [version_before - rollout.policy_version for rollout in rollouts if rollout.policy_version is not None]
    values: Metrics = {
        "train/loss": found.loss if found else None,
        "train/learning_rate": learning_rate,
        "train/grad_norm": result.optim.grad_norm if result else None,
        "train/adapter_max_abs": adapter_max_abs,
        "train/entropy": found.entropy if found else None,
        "train/kl_reference": found.kl_reference if found else None,
        "train/distill_kl": found.distill_kl if found else None,
        "train/clip_fraction": found.clip_fraction if found else None,
        "ratio/mean": found.ratio_mean if found else None,
        "ratio/max": found.ratio_max if found else None,
        "reward/mean": _mean(scores),
        "reward/std": _spread(scores),
        "logprobs/mean": logprob_mean,
        "logprobs/mean_training": training_mean,
        "logprobs/diff": None if logprob_mean is None or training_mean is None else logprob_mean - training_mean,
        "logprobs/mismatch_kl": found.mismatch_kl if found else None,
        "advantages/mean": _mean(advantages),
        "advantages/std": _spread(advantages),
        "train/reward_mean": _mean(scores),
        "train/percent_correct": _mean([float(rollout.correct) for rollout in rollouts]),
        "eval/percent_correct": eval_percent_correct,
        "policy/version": result.policy_version if result else version_before,
        "policy/lag": _mean(lags),
        "groups/zero_variance_fraction": batch.zero_variance_groups / batch.groups if batch.groups else None,
        "rollouts/truncated_fraction": _mean([float(one) for one in known]),
        "rollouts/overlong": batch.overlong_sequences,
        "rollouts/length_mean": _mean([rollout.length for rollout in rollouts]),
        "time/step_s": times.step_s,
        "time/sample_s": times.sample_s,
        "time/train_s": result.train_s if result else 0.0,
        "tokens/trained": batch.trained_tokens,
        "tokens/missing_logprobs": batch.missing_logprobs,
        "tokens/sampled_per_s": times.sampled_tokens / times.sample_s if times.sample_s > 0 else None,
    }
    assert values.keys() == METRIC_NAMES.keys()
    return {**values, **_reward_parts(rollouts)}


def _trained_values(batch: TrainingBatch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sampler logprobs, where there are some, and advantages of the tokens in the loss."""
    none = np.zeros(0)
    logprobs = [one.sampler_logprobs_T[one.trainable_T & ~one.missing_T] for one in batch.data]
    advantages = [one.advantages_T[one.trainable_T] for one in batch.data]
    return np.concatenate([none, *logprobs]), np.concatenate([none, *advantages])


def _reward_parts(rollouts: Sequence[Rollout]) -> Metrics:
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts} - {"mean", "std"})
    return {
        f"reward/{name}": _mean([r.reward_parts[name] for r in rollouts if name in r.reward_parts]) for name in names
    }


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _spread(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    """Population standard deviation."""
    return float(np.std(values)) if len(values) else None


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def finite(values: Mapping[str, float | None]) -> Metrics:
    """NaN and infinity become None."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


class JsonLines:
    """Appends whole lines to one file; a reader never sees half a line end in a newline."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, lines: Iterable[Mapping[str, object]]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


class LastEvaluation:
    """Follows the environment's ``env_metrics.jsonl`` and remembers its last ``eval/percent_correct``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._value: float | None = None

    def read(self) -> float | None:
        """Reads only what is new; a torn last line is left for next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return self._value
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                value = json.loads(line).get("eval/percent_correct")
            except (ValueError, AttributeError):
                continue
            if isinstance(value, int | float):
                self._value = float(value)
        return self._value

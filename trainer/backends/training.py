"""One optimizer step as a backend is told it and as it answers: what is minimised, by how much, what was found.

No torch here. Invariant: the settings name every choice that changes a gradient, with no null left to be filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hermes_rl_mcp.contracts.config import CLIP_THRESHOLDS, TrainerConfig

if TYPE_CHECKING:
    from trainer.backends.base import Backend, Datum

LossName = Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"]
Reduction = Literal["token_mean", "token_sum", "seq_mean", "dr_grpo"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The loss of one optimizer step. The fields are those of TrainerConfig, which says what each means; the formulas
    are in ``trainer/backends/local/losses.py``."""

    loss_fn: LossName = "importance_sampling"
    clip_low: float = 0.0
    clip_high: float = math.inf
    """Bounds of the ratio, absolute."""
    dro_beta: float = 0.05
    reduction: Reduction = "token_mean"
    max_token_length: int = 1
    """Longest completion, tokens; the constant of ``dr_grpo``."""
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "advantage"] = "loss"
    importance_correction: Literal["off", "truncate", "mask"] = "off"
    importance_cap: float = 2.0
    importance_level: Literal["token", "sequence"] = "token"
    distill_coef: float = 0.0

    @classmethod
    def of(cls, config: TrainerConfig, max_token_length: int) -> LossSettings:
        """``max_token_length`` is the environment's budget per completion."""
        low, high = CLIP_THRESHOLDS.get(config.loss_fn, (0.0, math.inf))
        return cls(
            loss_fn=config.loss_fn,
            clip_low=low if config.clip_low_threshold is None else config.clip_low_threshold,
            clip_high=high if config.clip_high_threshold is None else config.clip_high_threshold,
            dro_beta=config.dro_beta,
            reduction=config.loss_reduction,
            max_token_length=max_token_length,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            kl_in=config.kl_in,
            importance_correction=config.importance_correction,
            importance_cap=config.importance_cap,
            importance_level=config.importance_level,
            distill_coef=config.distill_coef,
        )


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Of one optimizer step; no weight decay."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip_norm: float = 1.0
    """0 = off."""

    @classmethod
    def of(cls, config: TrainerConfig, learning_rate: float) -> AdamParams:
        return cls(learning_rate, config.adam_beta1, config.adam_beta2, config.adam_eps, config.grad_clip_norm)


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """What one pass over the data found, on the weights before the step. Means are over its trained tokens."""

    loss: float
    """The whole of it: policy, KL and distillation."""
    tokens: int
    """Trained tokens."""
    seconds: float
    entropy: float | None = None
    """Of the policy at the tokens' temperature, nats."""
    clip_fraction: float = 0.0
    """Tokens whose ratio the loss clipped, or whose weight the importance correction cut."""
    logprob_mean: float | None = None
    """Of the trainer, nats; like the next three over the tokens that came with a sampler logprob. None: none did."""
    ratio_mean: float | None = None
    """exp(trainer logprob - sampler logprob), before any cap."""
    ratio_max: float | None = None
    mismatch_kl: float | None = None
    """k3 estimate of the distance between sampler and trainer, nats."""
    kl_reference: float | None = None
    """k3 estimate of the distance from the reference policy, nats; None where the loss does not need one."""
    distill_kl: float | None = None
    """Distance from the teacher over its candidates, nats; mean over tokens that have some, None without any."""


@dataclass(frozen=True, slots=True)
class OptimStep:
    """What one optimizer step did."""

    grad_norm: float
    """Before clipping."""
    adapter_max_abs: float
    """After the step."""
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """A whole step: gradient, optimizer, publication."""

    found: ForwardBackward
    optim: OptimStep
    policy_version: int
    """After the step."""

    @property
    def train_s(self) -> float:
        return self.found.seconds + self.optim.seconds


class NonFiniteError(Exception):
    """Loss or gradient is NaN or infinite; the step was not taken."""


class StepAbandonedError(Exception):
    """The caller asked to stop in the middle of a step; the step was not taken."""


def never() -> bool:
    """For callers that do not stop."""
    return False


def silent(number: int, of: int) -> None:
    """For callers that show no progress."""


def train_step(
    backend: Backend,
    data: Sequence[Datum],
    loss: LossSettings,
    adam: AdamParams,
    stopping: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = silent,
) -> StepResult:
    """Gradient of ``data``, one optimizer step, and the new version for whoever samples.

    Raises NonFiniteError or StepAbandonedError with weights, optimizer and version untouched.
    """
    found = backend.forward_backward(data, loss, stopping, progress)
    optim = backend.optim_step(adam)
    return StepResult(found, optim, backend.publish())

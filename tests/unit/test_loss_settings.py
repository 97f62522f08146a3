"""From configuration to loss: defaults of each loss, and settings that contradict each other are refused early."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError
from test_config_resolution import local, messages

from hermes_rl_mcp.contracts.config import TrainerConfig
from trainer.backends.training import AdamParams, LossSettings


@pytest.mark.parametrize(
    ("loss_fn", "low", "high"),
    [
        ("importance_sampling", 0.0, math.inf),
        ("ppo", 0.8, 1.2),
        ("cispo", 0.0, 4.0),
        ("dro", 0.0, math.inf),
        ("gspo", 1 - 3e-4, 1 + 4e-4),
    ],
)
def test_each_loss_has_its_own_bounds(loss_fn: Any, low: float, high: float) -> None:
    settings = LossSettings.of(TrainerConfig(loss_fn=loss_fn), 64)
    assert (settings.loss_fn, settings.clip_low, settings.clip_high) == (loss_fn, low, high)


def test_one_bound_may_be_set_alone() -> None:
    settings = LossSettings.of(TrainerConfig(loss_fn="ppo", clip_high_threshold=1.28), 64)
    assert (settings.clip_low, settings.clip_high) == (0.8, 1.28)


def test_every_setting_of_the_loss_and_of_adam_comes_from_the_configuration() -> None:
    config = TrainerConfig(
        loss_fn="cispo",
        loss_reduction="dr_grpo",
        dro_beta=0.1,
        kl_coef=0.2,
        kl_estimator="k1",
        kl_in="advantage",
        importance_correction="mask",
        importance_cap=3.0,
        importance_level="sequence",
        distill_coef=0.4,
        adam_beta1=0.5,
        adam_beta2=0.6,
        adam_eps=0.7,
        grad_clip_norm=0.8,
    )
    assert LossSettings.of(config, 77) == LossSettings(
        "cispo", 0.0, 4.0, 0.1, "dr_grpo", 77, 0.2, "k1", "advantage", "mask", 3.0, "sequence", 0.4
    )
    assert AdamParams.of(config, 0.9) == AdamParams(0.9, 0.5, 0.6, 0.7, 0.8)


CONTRADICTIONS = [
    ({"loss_fn": "ppo", "clip_low_threshold": 1.0, "clip_high_threshold": 1.0}, "must differ"),
    ({"loss_fn": "ppo", "clip_low_threshold": 1.3}, "begins at 1"),
    ({"loss_fn": "cispo", "clip_high_threshold": 0.5}, "begins at 1"),
    ({"loss_fn": "ppo", "clip_high_threshold": 0.2}, "begins at 1"),
    ({"clip_high_threshold": 1.2}, "importance_sampling does not clip: choose one of ppo, cispo, gspo"),
    ({"loss_fn": "dro", "clip_low_threshold": 0.8}, "dro does not clip"),
    ({"loss_fn": "dro", "importance_correction": "truncate"}, "takes away what dro is"),
]


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainerConfig(**values)


@pytest.mark.parametrize(("values", "words"), CONTRADICTIONS[:1] + CONTRADICTIONS[-1:])
def test_the_configuration_tells_of_them_before_a_start(values: dict[str, Any], words: str) -> None:
    [problem] = messages(local(values))
    assert words in problem
    assert "do not fit together: " in problem and "value error" not in problem.lower()
    assert messages(local({"loss_fn": values["loss_fn"]})) == []

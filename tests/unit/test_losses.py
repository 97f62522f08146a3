"""The formulas of the losses, on numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.backends.local import losses
from trainer.backends.local.losses import Terms, Tokens, policy_terms
from trainer.backends.training import Estimator, LossName, LossSettings, Reduction


def _tokens(ratios: Sequence[float], advantages: Sequence[float], sequences: Sequence[int] | None = None) -> Tokens:
    """With sampler logprobs of -2 and the trainer's at the given ratios to them."""
    ratios_M = torch.tensor(ratios, dtype=torch.float64)
    numbers = torch.tensor(sequences or [0] * len(ratios))
    return Tokens(
        (ratios_M.log() - 2.0).requires_grad_(),
        torch.full_like(ratios_M, -2.0),
        torch.tensor(advantages, dtype=torch.float64),
        numbers,
        int(numbers.max()) + 1,
    )


def _gradient(tokens: Tokens, terms: Terms) -> list[float]:
    """dL/dl for each token, L the sum of the terms."""
    (gradient_M,) = torch.autograd.grad(terms.loss_M.sum(), tokens.logprobs_M)
    return [float(value) for value in gradient_M]


def _run(tokens: Tokens, settings: LossSettings) -> tuple[list[float], list[float], list[bool]]:
    terms = policy_terms(tokens, settings)
    return terms.loss_M.tolist(), _gradient(tokens, terms), terms.clipped_M.tolist()


IS = LossSettings()
PPO = LossSettings(loss_fn="ppo", clip_low=0.8, clip_high=1.2)
CISPO = LossSettings(loss_fn="cispo", clip_low=0.0, clip_high=4.0)
DRO = LossSettings(loss_fn="dro", dro_beta=0.5)
GSPO = LossSettings(loss_fn="gspo", clip_low=0.9, clip_high=1.1)


def test_importance_sampling_is_minus_ratio_times_advantage() -> None:
    loss, gradient, clipped = _run(_tokens([0.5, 3.0], [2.0, -1.0]), IS)
    assert loss == pytest.approx([-1.0, 3.0])
    assert gradient == pytest.approx([-1.0, 3.0])  # its own derivative: d rho / d l = rho
    assert clipped == [False, False]


def test_ppo_takes_the_smaller_term_for_both_signs_of_the_advantage() -> None:
    loss, gradient, clipped = _run(_tokens([0.2, 2.0], [-1.0, -1.0]), PPO)
    assert loss == pytest.approx([0.8, 2.0])
    assert gradient == pytest.approx([0.0, 2.0])  # below the bounds it is left alone, above them still pushed down
    assert clipped == [True, False]
    loss, gradient, clipped = _run(_tokens([0.2, 2.0], [1.0, 1.0]), PPO)
    assert loss == pytest.approx([-0.2, -1.2])
    assert gradient == pytest.approx([-0.2, 0.0])
    assert clipped == [False, True]


def test_ppo_within_its_bounds_and_at_ratio_one_is_importance_sampling() -> None:
    tokens = _tokens([0.81, 1.0, 1.19], [1.0, -3.0, 2.0])
    assert _run(tokens, PPO) == _run(tokens, IS)


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    tokens = _tokens([0.5, 9.0], [1.0, -2.0])
    loss, gradient, clipped = _run(tokens, CISPO)
    logprobs = tokens.logprobs_M.tolist()
    assert loss == pytest.approx([-0.5 * logprobs[0], 8.0 * logprobs[1]])
    assert gradient == pytest.approx([-0.5, 8.0])
    assert clipped == [False, True]
    assert _run(tokens, replace(CISPO, clip_low=0.75))[1:] == (pytest.approx([-0.75, 8.0]), [True, True])


def test_dro_pulls_the_log_ratio_towards_zero() -> None:
    tokens = _tokens([math.exp(0.4), math.exp(-2.0)], [1.0, 0.0])
    loss, gradient, clipped = _run(tokens, DRO)
    assert loss == pytest.approx([1.6 + 0.25 * 0.16, 0.25 * 4.0])  # -l·A + beta/2·x²
    assert gradient == pytest.approx([-1.0 + 0.5 * 0.4, 0.5 * -2.0])
    assert clipped == [False, False]


def test_gspo_has_one_ratio_for_a_sequence_the_geometric_mean() -> None:
    tokens = _tokens([0.5, 2.0, 4.0, 1.0], [1.0, -1.0, 1.0, -1.0], sequences=[0, 1, 0, 1])
    wide = replace(GSPO, clip_low=0.0, clip_high=9.0)
    first, second = math.sqrt(2.0), math.sqrt(2.0)
    loss, gradient, _ = _run(tokens, wide)
    assert loss == pytest.approx([-first, second, -first, second])
    assert gradient == pytest.approx([-first, second, -first, second])  # n tokens, 1/n of the ratio's derivative each
    loss, gradient, clipped = _run(tokens, GSPO)
    assert loss == pytest.approx([-1.1, second, -1.1, second])
    assert gradient == pytest.approx([0.0, second, 0.0, second])
    assert clipped == [True, False, True, False]


@pytest.mark.parametrize(
    ("correction", "level", "weights", "cut"),
    [
        ("truncate", "token", [0.25, 2.0, 1.0], [False, True, False]),
        ("mask", "token", [0.0, 0.0, 1.0], [True, True, False]),
        ("truncate", "sequence", [1.0, 2.0, 1.0], [False, True, False]),
        ("mask", "sequence", [1.0, 0.0, 1.0], [False, True, False]),
    ],
)
def test_correction_weighs_without_gradient_and_leaves_a_ratio_of_one(
    correction: str, level: str, weights: list[float], cut: list[bool]
) -> None:
    settings = LossSettings(importance_correction=correction, importance_level=level, importance_cap=2.0)  # type: ignore[arg-type]
    numbers = [0, 1, 2] if level == "token" else [0, 1, 0]
    ratios = [0.25, 3.0, 1.0] if level == "token" else [0.5, 3.0, 2.0]
    tokens = _tokens(ratios, [1.0, 1.0, -1.0], numbers)
    loss, gradient, clipped = _run(tokens, settings)
    expected = [-weights[0], -weights[1], weights[2]]
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx(expected)
    assert clipped == cut


def test_a_correction_of_the_whole_sequence_is_the_product_of_its_ratios() -> None:
    settings = LossSettings(importance_correction="truncate", importance_level="sequence", importance_cap=100.0)
    loss, _, _ = _run(_tokens([2.0, 3.0, 5.0], [1.0] * 3, [0, 0, 1]), settings)
    assert loss == pytest.approx([-6.0, -6.0, -5.0])


def test_a_correction_survives_a_sampler_that_found_a_token_impossible() -> None:
    tokens = _tokens([1.0, 1.0], [1.0, 1.0])
    tokens.sampler_logprobs_M[0] = -1e6
    settings = LossSettings(importance_correction="truncate", importance_cap=2.0)
    loss, gradient, clipped = _run(tokens, settings)
    assert (loss, gradient, clipped) == ([-2.0, -1.0], [-2.0, -1.0], [True, False])


@pytest.mark.parametrize("loss_fn", get_args(LossName))
@pytest.mark.parametrize("correction", ["off", "truncate"])
def test_a_sequence_gives_the_same_terms_whatever_lies_beside_it(loss_fn: LossName, correction: str) -> None:
    settings = replace(GSPO, loss_fn=loss_fn, importance_correction=correction, importance_level="sequence")  # type: ignore[arg-type]
    ratios, advantages = [0.5, 1.5, 1.05, 0.7, 1.3], [1.0, -1.0, 0.5, 2.0, -0.1]
    whole = policy_terms(_tokens(ratios, advantages, [0, 1, 0, 1, 0]), settings)
    for number in (0, 1):
        mine = slice(number, None, 2)
        alone = policy_terms(_tokens(ratios[mine], advantages[mine]), settings)
        assert torch.equal(whole.loss_M[mine], alone.loss_M)
        assert torch.equal(whole.clipped_M[mine], alone.clipped_M)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) + d - 1, lambda d: 1 - math.exp(-d)),
    ],
)
@pytest.mark.parametrize("difference", [-1.5, 0.0, 0.7])
def test_kl_estimates_follow_their_formulas(
    estimator: Estimator, value: Callable[[float], float], slope: Callable[[float], float], difference: float
) -> None:
    logprob = torch.tensor([difference - 3.0], dtype=torch.float64, requires_grad=True)
    kl = losses.kl(logprob, torch.tensor([-3.0], dtype=torch.float64), estimator)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert kl.item() == pytest.approx(value(difference), abs=1e-12)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope(difference), abs=1e-12)


def test_every_kl_estimate_but_k2_averages_to_the_kl() -> None:
    p, r = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    exact = float((p.exp() * (p - r)).sum())
    for estimator in get_args(Estimator):
        mean = float((p.exp() * losses.kl(p, r, estimator)).sum())
        assert (mean == pytest.approx(exact, rel=1e-5)) is (estimator != "k2")


def test_distillation_is_the_kl_over_the_teachers_candidates_and_the_rest() -> None:
    policy_MV = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64).log()
    logits_MV = policy_MV.clone().requires_grad_()
    ids_MK = torch.tensor([[2, 1], [0, -1]])
    teacher_MK = torch.tensor([[0.7, 0.2], [0.5, 1.0]], dtype=torch.float64).log()
    chosen_MK = torch.log_softmax(logits_MV, -1).gather(1, ids_MK.clamp(min=0))
    terms_M = losses.distillation(chosen_MK, teacher_MK, ids_MK >= 0)
    first = 0.7 * math.log(0.7 / 0.3) + 0.2 * math.log(0.2 / 0.6) + 0.1 * math.log(0.1 / 0.1)
    assert terms_M.tolist() == pytest.approx([first, 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)])
    (gradient_MV,) = torch.autograd.grad(terms_M.sum(), logits_MV)
    assert gradient_MV[0].tolist() == pytest.approx([0.1 - 0.1, 0.6 - 0.2, 0.3 - 0.7])  # policy - teacher
    assert gradient_MV[1].tolist() == pytest.approx([0.2 - 0.5, 0.2 - 0.5 * 0.25, 0.6 - 0.5 * 0.75])


@pytest.mark.parametrize(("teacher", "pull"), [(0.7, -1), (0.1, 1), (0.4, 0)])
def test_a_teacher_that_speaks_of_the_sampled_token_alone_draws_it_to_its_own_probability(
    teacher: float, pull: int
) -> None:
    chosen_MK = torch.tensor([[math.log(0.4)]], dtype=torch.float64, requires_grad=True)
    terms_M = losses.distillation(
        chosen_MK, torch.tensor([[math.log(teacher)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    )
    (gradient_MK,) = torch.autograd.grad(terms_M.sum(), chosen_MK)
    assert float(gradient_MK) == pytest.approx((0.4 - teacher) / 0.6, abs=1e-12)
    assert math.copysign(pull, float(gradient_MK)) == pull or pull == 0


def test_distillation_of_a_token_without_candidates_is_nothing() -> None:
    chosen_MK = torch.full((1, 2), -1.0, requires_grad=True)
    terms_M = losses.distillation(chosen_MK, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    terms_M.sum().backward()  # type: ignore[no-untyped-call]
    assert terms_M.tolist() == [0.0]
    assert chosen_MK.grad is not None
    assert chosen_MK.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [0.1, 0.1, 0.1]),
        ("token_sum", [1.0, 1.0, 1.0]),
        ("seq_mean", [1 / (3 * 2), 1 / (3 * 7), 1 / (3 * 1)]),
        ("dr_grpo", [1 / 60] * 3),
    ],
)
def test_a_reduction_is_a_weight_per_sequence(reduction: Reduction, expected: list[float]) -> None:
    assert losses.sequence_weights([2, 7, 1], reduction, 20).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_a_sequence_without_trained_tokens_changes_no_weight(reduction: Reduction) -> None:
    with_it = losses.sequence_weights([2, 0, 7], reduction, 20)
    assert np.delete(with_it, 1).tolist() == losses.sequence_weights([2, 7], reduction, 20).tolist()


def test_means_and_sums_of_a_sequence_ignore_where_its_tokens_lie() -> None:
    tokens = _tokens([1.0] * 5, [0.0] * 5, [2, 0, 2, 2, 0])
    values_M = torch.tensor([1.0, 10.0, 2.0, 3.0, 30.0])
    assert tokens.sums(values_M).tolist() == [6.0, 40.0, 6.0, 6.0, 40.0]
    means_M: Tensor = tokens.means(values_M)
    assert means_M.tolist() == [2.0, 20.0, 2.0, 2.0, 20.0]

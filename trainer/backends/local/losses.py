"""Policy losses, importance corrections, KL estimates and reductions, as pure functions of the trained tokens.

Notation: l_t is the trainer's logprob of token t and carries the gradient; s_t the sampler's; o_t the trainer's own
before the step, which with one optimizer step per batch is l_t without its gradient; A_t the advantage. All are
tensors over the M trained tokens of whole sequences. Every function returns one term per token to be minimised, before
the reduction's weight. Invariant: a term depends on the tokens of its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.backends.training import Estimator, LossSettings, Reduction

_SMALLEST_REST = 1e-6
"""Probability beyond a teacher's candidates that the policy is taken to have left at least: about fp32's rounding."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The M trained tokens of some sequences, every one with all of its own. Logprobs in nats."""

    logprobs_M: Tensor
    """l, with gradient."""
    sampler_logprobs_M: Tensor
    """s; l without gradient where the sampler gave none."""
    advantages_M: Tensor
    sequences_M: Tensor
    """Which sequence a token belongs to, int64, below ``sequences``."""
    sequences: int

    @property
    def old_logprobs_M(self) -> Tensor:
        """o."""
        return self.logprobs_M.detach()

    def sums(self, values_M: Tensor) -> Tensor:
        """Sum over the sequence, given to each of its tokens."""
        totals_S = values_M.new_zeros(self.sequences).index_add(0, self.sequences_M, values_M)
        return totals_S.index_select(0, self.sequences_M)

    def means(self, values_M: Tensor) -> Tensor:
        """Mean over the sequence's trained tokens, given to each of them."""
        return self.sums(values_M) / self.sums(torch.ones_like(values_M))


@dataclass(frozen=True, slots=True)
class Terms:
    """What each token adds to the loss, and where clipping or a cap changed that."""

    loss_M: Tensor
    clipped_M: Tensor
    """Bool."""


def policy_terms(tokens: Tokens, settings: LossSettings) -> Terms:
    """The policy loss with its importance correction.

    Off, the ratio is against the sampler: rho_t = exp(l_t - s_t). On, it is against the trainer's own logprob,
    rho_t = exp(l_t - o_t), and what the sampler did differently goes into a weight without gradient, see
    ``correction``. rho is 1 then in value, so that ppo, cispo and gspo do not clip.
    """
    if settings.importance_correction == "off":
        return _loss(tokens, tokens.logprobs_M - tokens.sampler_logprobs_M, settings)
    terms = _loss(tokens, tokens.logprobs_M - tokens.old_logprobs_M, settings)
    weights_M, cut_M = correction(tokens, settings)
    return Terms(weights_M * terms.loss_M, terms.clipped_M | cut_M)


def _loss(tokens: Tokens, log_ratio_M: Tensor, settings: LossSettings) -> Terms:
    low, high = settings.clip_low, settings.clip_high
    match settings.loss_fn:
        case "importance_sampling":
            return importance_sampling(log_ratio_M, tokens.advantages_M)
        case "ppo":
            return ppo(log_ratio_M, tokens.advantages_M, low, high)
        case "cispo":
            return cispo(tokens.logprobs_M, log_ratio_M, tokens.advantages_M, low, high)
        case "dro":
            return dro(tokens.logprobs_M, log_ratio_M, tokens.advantages_M, settings.dro_beta)
        case "gspo":
            return ppo(tokens.means(log_ratio_M), tokens.advantages_M, low, high)


def importance_sampling(log_ratio_M: Tensor, advantages_M: Tensor) -> Terms:
    """-rho·A, rho = exp(log ratio). Tinker's ``importance_sampling``."""
    return Terms(-log_ratio_M.exp() * advantages_M, torch.zeros_like(log_ratio_M, dtype=torch.bool))


def ppo(log_ratio_M: Tensor, advantages_M: Tensor, low: float, high: float) -> Terms:
    """-min(rho·A, clip(rho, low, high)·A), the minimum for both signs of A (Schulman et al. 2017, equation 7, with
    Tinker's absolute bounds): a bad token whose ratio rose above ``high`` is still pushed down, and one whose ratio
    fell below ``low`` is left alone.

    GSPO (Zheng et al. 2025, equations 5 to 7) is the same with rho = exp(mean over the sequence's tokens of the log
    ratio) at each of its tokens; with ``seq_mean`` it is the paper's objective.
    """
    ratio_M = log_ratio_M.exp()
    bound_M = ratio_M.clamp(low, high)
    clipped_M = ((advantages_M > 0) & (ratio_M > high)) | ((advantages_M < 0) & (ratio_M < low))
    return Terms(-torch.minimum(ratio_M * advantages_M, bound_M * advantages_M), clipped_M)


def cispo(logprobs_M: Tensor, log_ratio_M: Tensor, advantages_M: Tensor, low: float, high: float) -> Terms:
    """-sg[clip(rho, low, high)]·A·l, sg without gradient (MiniMax-M1 2025, equation 4; Tinker's ``cispo``)."""
    ratio_M = log_ratio_M.detach().exp()
    clipped_M = (ratio_M < low) | (ratio_M > high)
    return Terms(-ratio_M.clamp(low, high) * advantages_M * logprobs_M, clipped_M)


def dro(logprobs_M: Tensor, log_ratio_M: Tensor, advantages_M: Tensor, beta: float) -> Terms:
    """-(l·A - beta/2·(log ratio)²) (Richemond et al. 2024; Tinker's ``dro``)."""
    loss_M = -(logprobs_M * advantages_M - beta / 2 * log_ratio_M.square())
    return Terms(loss_M, torch.zeros_like(loss_M, dtype=torch.bool))


def correction(tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Weights for a sampler that is not quite the trainer, and which of them were cut; no gradient.

    w = exp(o_t - s_t), or at sequence level exp(sum over the sequence of o - s). ``truncate``: min(w, C), C the cap
    (TIS, Yao et al. 2025). ``mask``: 1 where 1/C <= w <= C, else 0 (rejection, as in SkyRL's and verl's masks). A token
    that is masked still counts in the reduction's divisor. One without a sampler logprob has o - s = 0.
    """
    cap = settings.importance_cap
    difference_M = tokens.old_logprobs_M - tokens.sampler_logprobs_M
    weights_M = (difference_M if settings.importance_level == "token" else tokens.sums(difference_M)).exp()
    if settings.importance_correction == "truncate":
        return weights_M.clamp(max=cap), weights_M > cap
    outside_M = (weights_M > cap) | (weights_M < 1 / cap)
    return (~outside_M).to(weights_M.dtype), outside_M


def kl(logprobs_M: Tensor, reference_M: Tensor, estimator: Estimator) -> Tensor:
    """Distance from the reference policy per token, with d = l - r: k1 = d, k2 = d²/2, k3 = exp(-d) + d - 1 (Schulman,
    "Approximating KL divergence", 2020). As a term of the loss k1 has no gradient on average; k2's is that of the
    KL from policy to reference, k3's that of the reverse one. As a penalty on the advantage k1 is the unbiased one.
    """
    difference_M = logprobs_M - reference_M
    match estimator:
        case "k1":
            return difference_M
        case "k2":
            return difference_M.square() / 2
        case "k3":
            return torch.expm1(-difference_M) + difference_M


def distillation(chosen_MK: Tensor, teacher_MK: Tensor, present_MK: Tensor) -> Tensor:
    """The KL from teacher to policy over the K candidates and "any other token": sum of q·(log q - log p), with
    q = 1 - sum of the candidates' q for the last, and p likewise; 0 for a token without candidates. Never more than the
    whole KL, and 0 only where the policy has the teacher's probabilities. Top-k knowledge distillation (Hinton et al.
    2015, at temperature 1) on the policy's own samples. Nothing is normalised away: of a single candidate, the sampled
    token itself, the policy is drawn up or down to the teacher's probability.

    chosen_MK: the policy's logprobs of the candidates, with gradient, anything where not ``present``.
    """
    q_MK = teacher_MK.exp().masked_fill(~present_MK, 0.0)
    p_MK = chosen_MK.exp().masked_fill(~present_MK, 0.0)
    rest_q_M = (1.0 - q_MK.sum(dim=1)).clamp(min=0.0)
    log_rest_p_M = torch.log1p(-p_MK.sum(dim=1).clamp(max=1.0 - _SMALLEST_REST))
    named_M = (q_MK * (teacher_MK - chosen_MK)).masked_fill(~present_MK, 0.0).sum(dim=1)
    return named_M + torch.xlogy(rest_q_M, rest_q_M) - rest_q_M * log_rest_p_M


def sequence_weights(lengths_S: Sequence[int], reduction: Reduction, max_token_length: int) -> NDArray[np.float64]:
    """What the terms of each sequence are multiplied by, [S]; n is its number of trained tokens, and S counts the
    sequences that have some. The loss is the sum over all tokens of the optimizer step, however it is cut.

    ``token_mean`` 1 / sum of n (DAPO, Yu et al. 2025); ``token_sum`` 1 (Tinker); ``seq_mean`` 1 / (S·n) (GRPO, Shao et
    al. 2024); ``dr_grpo`` 1 / (S·L), L = ``max_token_length`` (Dr. GRPO, Liu et al. 2025).
    """
    n_S = np.asarray(lengths_S, np.float64)
    count = int((n_S > 0).sum())
    divisors_S: dict[Reduction, NDArray[np.float64]] = {
        "token_mean": np.full_like(n_S, n_S.sum()),
        "token_sum": np.ones_like(n_S),
        "seq_mean": count * np.maximum(n_S, 1.0),
        "dr_grpo": np.full_like(n_S, count * max_token_length),
    }
    return np.reciprocal(divisors_S[reduction])

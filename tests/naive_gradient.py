"""A naive trainer: what gradient a batch on the wire gives, as plainly as can be.

It reads the wire itself and follows the published formulas: one sequence at a time, all logits, ordinary log-softmax,
float64, transformers and peft as they come. It shares no line with the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import ScoredData

Gradient = dict[str, Tensor]
LONGEST_COMPLETION = 13
"""The constant of ``dr_grpo``."""


@dataclass
class Plain:
    """One sequence that is in the loss; lists over its M trained positions."""

    tokens: list[int]
    at: list[int]
    sampled: list[float | None]
    """None: missing, taken as sampled by the current policy."""
    advantages: list[float]
    temperature: float
    reference: list[float] | None
    teacher: list[list[tuple[int, float]]]


def plain_sequences(groups: Sequence[ScoredData], config: TrainerConfig) -> Iterator[Plain]:
    """What of the wire is in the loss, by the rules of Atropos' fields."""
    for group in groups:
        mean = math.fsum(group.scores) / len(group.scores)
        members = []
        for i, tokens in enumerate(group.tokens):
            notes = group.overrides[i] if group.overrides else {}
            generation, of_group = group.generation_params or {}, group.group_overrides or {}
            heat = notes.get("temperature", generation.get("temperature", of_group.get("temperature", 1.0)))
            logprobs = group.inference_logprobs[i] if group.inference_logprobs else [1.0] * len(tokens)
            length = min(len(tokens), config.max_token_trainer_length)
            known = [math.isfinite(value) and value <= 0 for value in logprobs]
            at = [j for j in range(1, length) if group.masks[i][j] != -100]
            at = [j for j in at if known[j] or config.missing_logprobs == "recompute"]
            ids, values = group.distill_token_ids, group.distill_logprobs
            teach = config.distill_coef > 0 and ids and values
            given = group.advantages[i] if group.advantages else [group.scores[i] - mean] * len(tokens)
            out = length < len(tokens) and config.overlong == "drop"
            out |= config.mask_truncated_completions and notes.get("finish_reason") == "length"
            if notes.get("set_advantage_to_zero"):  # what is left then is what a teacher says
                given = [0.0] * len(tokens)
                out |= not teach
            if out or not at:
                continue
            members.append(
                Plain(
                    tokens=tokens[:length],
                    at=at,
                    sampled=[logprobs[j] if known[j] else None for j in at],
                    advantages=[given[j] for j in at],
                    temperature=heat,
                    reference=[group.ref_logprobs[i][j] for j in at] if group.ref_logprobs else None,
                    teacher=[list(zip(ids[i][j], values[i][j], strict=True)) for j in at] if teach else [],
                )
            )
        if any(abs(a) > 1e-6 for one in members for a in one.advantages) or any(one.teacher for one in members):
            yield from members


def estimate(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """http://joschu.net/blog/kl-approx.html, per token; samples are the policy's."""
    gap = reference - policy
    return {"k1": -gap, "k2": gap**2 / 2, "k3": torch.exp(gap) - gap - 1}[name]


def policy_terms(config: TrainerConfig, l: Tensor, s: Tensor, advantages: Tensor) -> Tensor:  # noqa: E741  the formula's
    """What is minimised, per token, before any average."""
    loss, frozen = config.loss_fn, l.detach()
    own = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}.get(loss, (0.0, math.inf))
    low = own[0] if config.clip_low_threshold is None else config.clip_low_threshold
    high = own[1] if config.clip_high_threshold is None else config.clip_high_threshold
    weight = torch.ones_like(l)
    if config.importance_correction != "off":
        gap = frozen - s
        weight = torch.exp(gap if config.importance_level == "token" else gap.sum().expand_as(gap))
        if config.importance_correction == "truncate":
            weight = weight.clamp(max=config.importance_cap)
        else:
            weight = ((weight >= 1 / config.importance_cap) & (weight <= config.importance_cap)).to(l.dtype)
        s = frozen
    ratio = torch.exp(l - s)
    if loss == "dro":
        return -(l * advantages - config.dro_beta / 2 * (l - s) ** 2)
    if loss == "cispo":
        return -weight * ratio.detach().clamp(low, high) * advantages * l
    if loss == "gspo":
        ratio = torch.exp((l - s).mean()).expand_as(l)
    unclipped = ratio * advantages
    if loss == "importance_sampling":
        return -weight * unclipped
    return -weight * torch.minimum(unclipped, ratio.clamp(low, high) * advantages)


def distillation_terms(logprobs_MV: Tensor, teacher: list[list[tuple[int, float]]]) -> Tensor:
    """KL from the teacher to the policy over its candidates and all other tokens together."""
    terms = []
    for row_V, candidates in zip(logprobs_MV, teacher, strict=True):
        ids = torch.tensor([token for token, _ in candidates], dtype=torch.long)
        q, p = torch.tensor([math.exp(value) for _, value in candidates], dtype=torch.float64), row_V[ids].exp()
        q, p = torch.cat([q, 1 - q.sum()[None]]), torch.cat([p, 1 - p.sum()[None]])
        terms.append((q * torch.log(q / p)).sum())
    return torch.stack(terms)


def naive(model: PeftModel, groups: Sequence[ScoredData], config: TrainerConfig) -> tuple[float, Gradient]:
    """Loss and gradient; both empty if nothing is left to train on."""
    model.zero_grad(set_to_none=True)
    per_sequence = []
    for one in plain_sequences(groups, config):
        ids, at = torch.tensor([one.tokens]), torch.tensor(one.at)
        targets = ids[0, at][:, None]
        logits = model(input_ids=ids).logits[0, at - 1]
        l = torch.log_softmax(logits / one.temperature, -1).gather(1, targets)[:, 0]  # noqa: E741
        s = torch.stack(
            [found if sent is None else torch.tensor(sent) for sent, found in zip(one.sampled, l.detach(), strict=True)]
        )
        advantages = torch.tensor(one.advantages, dtype=torch.float64)
        penalty = torch.zeros_like(l)
        if config.kl_coef:
            if one.reference is None:
                with torch.no_grad(), model.disable_adapter():
                    base = model(input_ids=ids).logits[0, at - 1]
                reference = torch.log_softmax(base / one.temperature, -1).gather(1, targets)[:, 0]
            else:
                reference = torch.tensor(one.reference, dtype=torch.float64)
            penalty = config.kl_coef * estimate(config.kl_estimator, l, reference)
            if config.kl_in == "advantage":
                advantages, penalty = advantages - penalty.detach(), torch.zeros_like(l)
        terms = policy_terms(config, l, s.to(torch.float64), advantages) + penalty
        if one.teacher:
            terms = terms + config.distill_coef * distillation_terms(torch.log_softmax(logits, -1), one.teacher)
        per_sequence.append(terms)
    if not per_sequence:
        return 0.0, {}
    total = torch.cat(per_sequence).sum()
    loss = {
        "token_sum": total,
        "token_mean": total / sum(map(len, per_sequence)),
        "seq_mean": torch.stack([terms.mean() for terms in per_sequence]).mean(),
        "dr_grpo": total / (len(per_sequence) * LONGEST_COMPLETION),
    }[config.loss_reduction]
    loss.backward()
    return float(loss.detach()), gradient(model)


def gradient(model: torch.nn.Module) -> Gradient:
    return {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}


def difference(one: Gradient, other: Gradient) -> float:
    """Relative to the norm of the whole gradient."""
    assert one.keys() == other.keys() != set()
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / norm)

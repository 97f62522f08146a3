"""Choose the next token of every row of a batch.

Invariants: the logprob that goes out is of the full softmax at the row's own temperature (1 for greedy rows), the same
quantity the trainer computes; top-p restricts which token is drawn, never what is reported. A row takes one uniform
number a token, so a row with a generator of its own draws the same whatever shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SamplingError(RuntimeError):
    """The model's logits are not numbers."""


def uniforms(own_generators: Sequence[torch.Generator | None], generator: torch.Generator) -> Tensor:
    """One number in [0, 1) for each row, from its own generator or else, in order, from the common one; [B], double.

    Generators live on the CPU, so that a seed means the same on every device.
    """
    shared_N = torch.rand(sum(own is None for own in own_generators), dtype=torch.float64, generator=generator)
    shared = iter(shared_N.tolist())
    numbers = [
        next(shared) if own is None else float(torch.rand((), dtype=torch.float64, generator=own))
        for own in own_generators
    ]
    return torch.tensor(numbers, dtype=torch.float64)


def choose(
    logits_BV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms_B: Tensor
) -> tuple[list[int], list[float]]:
    """Token ids and logprobs (nats), [B] each; temperature 0 takes the likeliest token. ``logits_BV`` is used up.

    A token is drawn by inverting the cumulative distribution at the row's uniform number, in double precision.
    """
    greedy = [temperature == 0.0 for temperature in temperatures]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_BV.div_(torch.tensor(divisors, dtype=logits_BV.dtype, device=logits_BV.device)[:, None])
    best = logits_BV.max(dim=-1)
    logits_BV.sub_(best.values[:, None])
    if all(greedy):
        tokens_B = best.indices
        chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
        norm_B = logits_BV.exp_().sum(dim=-1).log_()
    else:
        weights_BV = logits_BV.exp()
        norm_B = weights_BV.sum(dim=-1).log_()
        if any(top_p < 1.0 for top_p in top_ps):
            _keep_nucleus(weights_BV, top_ps)
        drawn_B = _invert(weights_BV, uniforms_B.to(logits_BV.device))
        tokens_B = torch.where(torch.tensor(greedy, device=drawn_B.device), best.indices, drawn_B)
        chosen_B = logits_BV.gather(1, tokens_B[:, None])[:, 0]
    logprobs = (chosen_B - norm_B).tolist()
    if not all(-float("inf") < value < float("inf") for value in logprobs):
        raise SamplingError("the model's logits are not finite")
    return tokens_B.tolist(), logprobs


def _invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulative weight is above the row's number times the whole."""
    cumulative_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    wanted_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    tokens_B = torch.searchsorted(cumulative_BV, wanted_B1, right=True)[:, 0]
    return tokens_B.clamp_(max=weights_BV.shape[1] - 1)


def _keep_nucleus(weights_BV: Tensor, top_ps: Sequence[float]) -> None:
    """Zero the tokens outside the smallest set whose probability reaches top_p; the most likely one always stays."""
    rows_N = torch.tensor([at for at, top_p in enumerate(top_ps) if top_p < 1.0], device=weights_BV.device)
    limits_N1 = torch.tensor([top_p for top_p in top_ps if top_p < 1.0], device=weights_BV.device)[:, None]
    sorted_NV, order_NV = weights_BV[rows_N].sort(dim=-1, descending=True)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    total_N1 = sorted_NV.sum(dim=-1, keepdim=True)
    sorted_NV = sorted_NV.masked_fill_(before_NV >= limits_N1 * total_N1, 0.0)
    weights_BV[rows_N] = torch.zeros_like(sorted_NV).scatter_(1, order_NV, sorted_NV)

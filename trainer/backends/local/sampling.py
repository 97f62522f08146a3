"""Choose the next token of every row of a batch.

Invariant: the logprob that goes out is of the full softmax at the row's own temperature (1 for greedy rows), the same
quantity the trainer computes; top-p restricts which token is drawn, never what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SamplingError(RuntimeError):
    """The model's logits are not numbers."""


def choose(
    logits_BV: Tensor,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    own_generators: Sequence[torch.Generator | None],
    generator: torch.Generator,
) -> tuple[list[int], list[float]]:
    """Token ids and logprobs, [B] each. Rows with their own generator give the same draw whatever the batch is."""
    greedy = [temperature == 0.0 for temperature in temperatures]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_BV = logits_BV / torch.tensor(divisors, device=logits_BV.device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if all(greedy):
        tokens_B = logprobs_BV.argmax(dim=-1)
    else:
        tokens_B = _draw(logprobs_BV, top_ps, own_generators, generator)
        if any(greedy):
            mask_B = torch.tensor(greedy, device=tokens_B.device)
            tokens_B = torch.where(mask_B, logprobs_BV.argmax(dim=-1), tokens_B)
    chosen = logprobs_BV.gather(1, tokens_B[:, None])[:, 0].tolist()
    if not all(value == value for value in chosen):
        raise SamplingError("the model's logits are not finite")
    return tokens_B.tolist(), chosen


def _draw(
    logprobs_BV: Tensor,
    top_ps: Sequence[float],
    own_generators: Sequence[torch.Generator | None],
    generator: torch.Generator,
) -> Tensor:
    probs_BV = logprobs_BV.exp()
    if any(top_p < 1.0 for top_p in top_ps):
        probs_BV = _nucleus(probs_BV, torch.tensor(list(top_ps), device=probs_BV.device))
    if not bool(torch.isfinite(probs_BV.sum())):
        raise SamplingError("the model's logits are not finite")
    if all(own is None for own in own_generators):
        return torch.multinomial(probs_BV, 1, generator=generator)[:, 0]
    return torch.cat(
        [
            torch.multinomial(probs_BV[row : row + 1], 1, generator=own or generator)[:, 0]
            for row, own in enumerate(own_generators)
        ]
    )


def _nucleus(probs_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Zero the tokens outside the smallest set whose probability reaches top_p; the most likely one always stays."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1.0), 0.0)
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV)

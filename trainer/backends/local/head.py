"""The output head: hidden states to logits in fp32, and the logprob of chosen tokens without keeping the logits.

Invariant: at most ``_CHUNK_ELEMENTS`` logits exist at a time per chunk, whatever the number of tokens; the sampler and
the trainer get their logits from the same function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 24
"""fp32 logits per chunk: 64 MiB, about 340 rows of a 49,152-word vocabulary."""


class Head:
    """The model's own (frozen) head with its scalings."""

    def __init__(self, model: Any) -> None:
        self._linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        self._cap = getattr(config, "final_logit_softcapping", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale = scale / float(getattr(config, "logits_scaling", None) or 1.0)
        self.vocabulary = int(self._linear.weight.shape[0])

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """[M, V], fp32."""
        logits: Tensor = self._linear(hidden_MH).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    def selected_logprobs(self, hidden_MH: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> Tensor:
        """log softmax(logits / temperature)[target] for every row, fp32 [M].

        With several chunks each is computed again in the backward pass, so that its logits need not be kept.
        """
        rows = max(1, _CHUNK_ELEMENTS // self.vocabulary)
        if hidden_MH.shape[0] <= rows:
            return self._chunk(hidden_MH, targets_M, temperatures_M)
        parts = [
            checkpoint(
                self._chunk,
                hidden_MH[at : at + rows],
                targets_M[at : at + rows],
                temperatures_M[at : at + rows],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for at in range(0, hidden_MH.shape[0], rows)
        ]
        return torch.cat(parts)

    def _chunk(self, hidden_CH: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> Tensor:
        logits_CV = self.logits(hidden_CH) / temperatures_C[:, None]
        chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
        return chosen_C - torch.logsumexp(logits_CV, dim=1)

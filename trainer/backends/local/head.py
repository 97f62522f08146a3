"""The output head: hidden states to logits in fp32, and the logprob of given tokens without keeping any logits.

Invariants: at most one chunk of logits exists at a time, whatever the number of tokens, in both directions; sampler and
trainer get their logits by the same steps; the head is frozen, so only hidden states get a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trainer.backends.local.products import linear

_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""fp32 logits per chunk. 16 MiB on a CPU, 85 rows of a 49,152-word vocabulary: more make the product hardly faster."""


class Head:
    """The model's own head with its scalings: logits = cap · tanh(scale · (h Wᵀ + b) / cap)."""

    def __init__(self, model: Any) -> None:
        self._linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        self._cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        self._scale = scale / float(getattr(config, "logits_scaling", None) or 1.0)
        self.vocabulary = int(self._linear.weight.shape[0])
        self._frozen = type(self._linear) is torch.nn.Linear
        """False for an adapter from elsewhere that adapts the head as well."""

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """[M, V], fp32 (fp64 for a model in fp64)."""
        logits = _at_least_fp32(self._project(hidden_MH))
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits

    def selected_logprobs(self, hidden_MH: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor]:
        """log softmax(logits / temperature)[target] with gradient for ``hidden_MH``, and the entropy of that softmax in
        nats without gradient; fp32 [M] each."""
        if self._frozen:
            logprobs_M, entropies_M = _Selected.apply(hidden_MH, targets_M, temperatures_M, self)  # type: ignore[no-untyped-call]
            return logprobs_M, entropies_M
        logprobs_MK, entropies_M = self._by_autograd(hidden_MH, targets_M[:, None], temperatures_M)
        return logprobs_MK[:, 0], entropies_M

    def chosen_logprobs(self, hidden_MH: Tensor, ids_MK: Tensor, temperatures_M: Tensor) -> Tensor:
        """log softmax(logits / temperature)[id] for K ids of every row, fp32 [M, K], with gradient for
        ``hidden_MH``."""
        if self._frozen:
            logprobs_MK: Tensor = _Chosen.apply(hidden_MH, ids_MK, temperatures_M, self)  # type: ignore[no-untyped-call]
            return logprobs_MK
        return self._by_autograd(hidden_MH, ids_MK, temperatures_M)[0]

    def chunks(self, count: int) -> list[slice]:
        """Of ``count`` rows."""
        elements = _CHUNK_ELEMENTS.get(self._linear.weight.device.type, _CHUNK_ELEMENTS["cpu"])
        rows = max(1, elements // self.vocabulary)
        return [slice(at, min(at + rows, count)) for at in range(0, count, rows)]

    def shifted(self, hidden_CH: Tensor, temperatures_C: Tensor) -> Tensor:
        """Logits / temperature less their row's largest, [C, V] in fp32. Without autograd, in one buffer."""
        x_CV = _at_least_fp32(self._project(hidden_CH))
        if self._scale != 1.0:
            x_CV.mul_(self._scale)
        if self._cap:
            x_CV.div_(self._cap).tanh_().mul_(self._cap)
        x_CV.div_(temperatures_C[:, None])
        return x_CV.sub_(x_CV.amax(1, keepdim=True))

    def to_hidden(self, d_CV: Tensor, hidden_CH: Tensor, temperatures_C: Tensor) -> Tensor:
        """The gradient for hidden states from that for logits / temperature, whose buffer is used up; [C, H] in the
        hidden states' dtype, which is rounded to only after the scalings."""
        d_CV.mul_(self._scale / temperatures_C[:, None])
        if self._cap:
            tanh_CV = _at_least_fp32(self._project(hidden_CH)).mul_(self._scale / self._cap).tanh_()
            d_CV.mul_(tanh_CV.square_().neg_().add_(1.0))
        weight_VH: Tensor = self._linear.weight
        return d_CV.to(weight_VH.dtype) @ weight_VH

    def _project(self, hidden_MH: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self._frozen:
            result: Tensor = self._linear(hidden_MH)
            return result
        return linear(hidden_MH, self._linear.weight, self._linear.bias)

    def _by_autograd(self, hidden_MH: Tensor, ids_MK: Tensor, temperatures_M: Tensor) -> tuple[Tensor, Tensor]:
        """For a head with parameters that learn: each chunk is computed again in the backward pass."""

        def chunk(hidden_CH: Tensor, ids_CK: Tensor, temperatures_C: Tensor) -> tuple[Tensor, Tensor]:
            logprobs_CV = torch.log_softmax(self.logits(hidden_CH) / temperatures_C[:, None], dim=1)
            entropies_C = -(logprobs_CV.detach().exp() * logprobs_CV.detach()).sum(1)
            return logprobs_CV.gather(1, ids_CK), entropies_C

        parts = [
            checkpoint(
                chunk, hidden_MH[at], ids_MK[at], temperatures_M[at], use_reentrant=False, preserve_rng_state=False
            )
            for at in self.chunks(hidden_MH.shape[0])
        ]
        return torch.cat([one for one, _ in parts]), torch.cat([other for _, other in parts])


class _Selected(torch.autograd.Function):
    """One logprob a row depends on that row's hidden state alone, so its whole gradient, (onehot(y) - p) W / τ, is
    computed beside it while the chunk's logits are there: H numbers a row are kept, no logit is computed twice.

    l = x[y] - z and H = z - Σ p x, with x the logits / τ and z = logsumexp(x).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, targets_M: Tensor, temperatures_M: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        logprobs, entropies, slopes = [], [], []
        for at in head.chunks(hidden_MH.shape[0]):
            hidden_CH, targets_C1, temperatures_C = hidden_MH[at], targets_M[at, None], temperatures_M[at]
            x_CV = head.shifted(hidden_CH, temperatures_C)
            chosen_C1 = x_CV.gather(1, targets_C1)
            p_CV = x_CV.exp()
            sum_C1 = p_CV.sum(1, keepdim=True)
            p_CV.div_(sum_C1)
            logprobs.append((chosen_C1 - sum_C1.log())[:, 0])
            entropies.append(sum_C1.log()[:, 0] - x_CV.mul_(p_CV).sum(1))
            del x_CV
            if wanted:
                d_CV = p_CV.neg_()
                d_CV.scatter_add_(1, targets_C1, torch.ones_like(chosen_C1))
                slopes.append(head.to_hidden(d_CV, hidden_CH, temperatures_C))
        logprobs_M, entropies_M = _joined(logprobs, temperatures_M), _joined(entropies, temperatures_M)
        if wanted:
            ctx.save_for_backward(_joined(slopes, hidden_MH))
        ctx.mark_non_differentiable(entropies_M)
        return logprobs_M, entropies_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (slopes_MH,) = ctx.saved_tensors
        return (slopes_MH * g_M[:, None]).to(slopes_MH.dtype), None, None, None


class _Chosen(torch.autograd.Function):
    """Several logprobs a row: their weights are known only in the backward pass, where each chunk is computed again.

    d = Σ_k g_k (onehot(y_k) - p),  dh = d W / τ.
    """

    @staticmethod
    def forward(ctx: Any, hidden_MH: Tensor, ids_MK: Tensor, temperatures_M: Tensor, head: Head) -> Tensor:
        parts = []
        for at in head.chunks(hidden_MH.shape[0]):
            x_CV = head.shifted(hidden_MH[at], temperatures_M[at])
            chosen_CK = x_CV.gather(1, ids_MK[at])
            parts.append(chosen_CK - x_CV.exp_().sum(1, keepdim=True).log())
        ctx.save_for_backward(hidden_MH, ids_MK, temperatures_M)
        ctx.head = head
        return torch.cat(parts) if parts else temperatures_M.new_empty(ids_MK.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MH, ids_MK, temperatures_M = ctx.saved_tensors
        head: Head = ctx.head
        parts = []
        for at in head.chunks(hidden_MH.shape[0]):
            p_CV = head.shifted(hidden_MH[at], temperatures_M[at]).exp_()
            d_CV = p_CV.mul_(-g_MK[at].sum(1, keepdim=True) / p_CV.sum(1, keepdim=True))
            d_CV.scatter_add_(1, ids_MK[at], g_MK[at])
            parts.append(head.to_hidden(d_CV, hidden_MH[at], temperatures_M[at]))
        return _joined(parts, hidden_MH), None, None, None


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros_like(like)

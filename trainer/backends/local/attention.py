"""Attention over rows that hold a prompt once and its completions behind it.

Invariant: every completion gets what it would get in a row of its own behind the prompt: it sees the prompt and itself,
and a sliding window counts its own positions. Pairs of siblings, which a mask would only hide, are not computed where
that pays; then nothing is kept for the backward pass but queries, keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.backends.local.rows import PADDING, PROMPT


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``start`` to ``end`` of a row: they see themselves, causally, and the row's first ``prompt`` tokens."""

    row: int
    start: int
    end: int
    prompt: int

    @property
    def pairs(self) -> int:
        """Of a query and a key that are computed."""
        return (self.end - self.start) * (self.prompt + self.end - self.start)


@dataclass(slots=True)
class Layout:
    """Of a batch of rows [B, R]. Masks are made once and shared by all layers."""

    branches_BR: Tensor
    """PROMPT, then 0, 1, 2 ... for the completions, and PADDING at the end."""
    positions_BR: Tensor
    blocks: list[Block]
    """Empty where one dense mask is cheaper."""
    _masks: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        branches: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        *,
        device: torch.device,
        block_cost: float,
    ) -> Layout:
        """``block_cost`` is what a block costs beyond its work, in pairs of query and key."""
        blocks = [block for at, row in enumerate(branches) for block in _blocks(at, row)]
        cost = sum(block.pairs for block in blocks) + block_cost * len(blocks)
        dense = len(branches) * len(branches[0]) ** 2 + block_cost
        return cls(
            torch.tensor(branches, device=device),
            torch.tensor(positions, device=device),
            blocks if cost < dense else [],
        )

    def dense(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, R, R]."""
        name = (window or 0,)
        if name not in self._masks:
            keys_B1R, queries_BR1 = self.branches_BR[:, None, :], self.branches_BR[:, :, None]
            index_R = torch.arange(self.branches_BR.shape[1], device=self.branches_BR.device)
            allowed_BRR = (index_R[None, :] <= index_R[:, None]) & ((keys_B1R == PROMPT) | (keys_B1R == queries_BR1))
            if window is not None:
                allowed_BRR &= self.positions_BR[:, :, None] - self.positions_BR[:, None, :] < window
            self._masks[name] = _additive(allowed_BRR, dtype)[:, None]
        return self._masks[name]

    def of_block(self, block: Block, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Additive [groups * n, K], or None where plain causal attention will do."""
        count, keys = block.end - block.start, block.prompt + block.end - block.start
        if not block.prompt and (window is None or window >= count):
            return None
        name = (count, keys, window or 0)
        if name not in self._masks:
            at_K = torch.arange(keys, device=self.branches_BR.device)
            behind_nK = at_K[block.prompt :, None] - at_K[None, :]
            allowed_nK = (behind_nK >= 0) & (behind_nK < (window or keys))
            self._masks[name] = _additive(allowed_nK, dtype).repeat(groups, 1)
        return self._masks[name]


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def install(model: Any, implementation: str) -> None:
    """Let ``model``, which was loaded with ``implementation`` (sdpa or eager), take a ``layout`` beside its inputs."""
    name = f"layout_{implementation}"
    AttentionInterface.register(name, _sdpa if implementation == "sdpa" else _eager)
    AttentionMaskInterface.register(name, sdpa_mask if implementation == "sdpa" else eager_mask)
    model.set_attn_implementation(name)


def _sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return _attention(ALL_ATTENTION_FUNCTIONS["sdpa"], module, query, key, value, attention_mask, options)


def _eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    own = sys.modules[type(module).__module__].eager_attention_forward  # each family has one of its own
    return _attention(own, module, query, key, value, attention_mask, options)


def _attention(
    usual: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    layout: Layout | None = options.pop("layout", None)
    window = options.get("sliding_window")
    if layout is None or not layout.blocks:
        mask = attention_mask if layout is None else layout.dense(window, query.dtype)
        answer: tuple[Tensor, Tensor | None] = usual(module, query, key, value, mask, **options)
        return answer
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    out: Tensor = _Blocks.apply(query, key, value, layout, scaling, window, options.get("softcap"))  # type: ignore[no-untyped-call]
    return out, None


class _Blocks(torch.autograd.Function):
    """Queries [B, H, T, D], keys and values [B, G, T, D], H a multiple of G; the answer is [B, T, H, D].

    Each block is computed again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.layout, ctx.options = layout, (scaling, window, softcap)
        batch, heads, length, _ = query.shape
        out_BTHD = query.new_zeros(batch, length, heads, value.shape[-1])
        for block in layout.blocks:
            out_HnD = _attend(_slice(block, query, key, value), layout, block, scaling, window, softcap)
            out_BTHD[block.row, block.start : block.end] = out_HnD.transpose(0, 1)
        return out_BTHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_BTHD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        layout: Layout = ctx.layout
        d_query, d_key, d_value = (torch.zeros_like(one) for one in (query, key, value))
        for block in layout.blocks:
            q, k, v = (part.detach().requires_grad_() for part in _slice(block, query, key, value))
            with torch.enable_grad():
                out_HnD = _attend((q, k, v), layout, block, *ctx.options)
            own = slice(block.start, block.end)
            dq, dk, dv = torch.autograd.grad(out_HnD, (q, k, v), d_BTHD[block.row, own].transpose(0, 1))
            d_query[block.row, :, own] = dq
            for total, one in ((d_key, dk), (d_value, dv)):
                total[block.row, :, own] += one[:, block.prompt :]
                total[block.row, :, : block.prompt] += one[:, : block.prompt]
        return d_query, d_key, d_value, None, None, None, None


def _slice(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block's queries [H, n, D], and its keys and values [G, K, D], the prompt's first."""
    own = slice(block.start, block.end)
    if not block.prompt:
        return query[block.row, :, own], key[block.row, :, own], value[block.row, :, own]
    keys, values = (
        torch.cat([one[block.row, :, : block.prompt], one[block.row, :, own]], dim=1) for one in (key, value)
    )
    return query[block.row, :, own], keys, values


def _attend(
    parts: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    block: Block,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[H, n, D]. Heads that share keys are laid out as further queries, so that keys are not repeated."""
    query_HnD, key_GKD, value_GKD = parts
    heads, count, _ = query_HnD.shape
    groups = heads // key_GKD.shape[0]
    mask = layout.of_block(block, window, groups, query_HnD.dtype)
    if softcap is None and mask is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query_HnD[None], key_GKD[None], value_GKD[None], is_causal=True, scale=scaling, enable_gqa=groups > 1
        )[0]
    if mask is None:
        ones = torch.ones(count, count, dtype=torch.bool, device=query_HnD.device)
        mask = _additive(ones.tril(), query_HnD.dtype).repeat(groups, 1)
    query_GmD = query_HnD.reshape(key_GKD.shape[0], groups * count, -1)
    if softcap is None:
        out_GmD = torch.nn.functional.scaled_dot_product_attention(
            query_GmD[None], key_GKD[None], value_GKD[None], attn_mask=mask, scale=scaling
        )[0]
    else:
        scores_GmK = torch.tanh(query_GmD @ key_GKD.transpose(1, 2) * (scaling / softcap)) * softcap + mask
        out_GmD = torch.softmax(scores_GmK, dim=-1, dtype=torch.float32).to(query_HnD.dtype) @ value_GKD
    return out_GmD.view(heads, count, -1)


def _blocks(at: int, branches: Sequence[int]) -> list[Block]:
    length = sum(branch != PADDING for branch in branches)
    prompt = sum(branch == PROMPT for branch in branches)
    starts = [at for at in range(prompt, length) if at == prompt or branches[at] != branches[at - 1]]
    if len(starts) <= 1:  # one completion behind its prompt is one sequence
        return [Block(at, 0, length, 0)] if length else []
    ends = [*starts[1:], length]
    own = [Block(at, start, end, prompt) for start, end in zip(starts, ends, strict=True)]
    return [Block(at, 0, prompt, 0), *own] if prompt else own

"""Key-value cache of a running batch: grows in place, drops finished rows, takes in rows of other lengths.

Invariant: rows are left-padded, so every row's last token lies in the last column; the columns before a row's own
first token are zero and never attended to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_SLACK = 64
"""Columns added when a buffer is full: few enough to waste little, enough that most answers grow seldom."""


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers [B, heads, capacity, D], of which ``length`` columns are filled."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys = _room(key_states, key_states.shape[2])
        self.values = _room(value_states, value_states.shape[2])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            extra = max(_SLACK, end // 4)
            self.keys = _regrow(self.keys[:, :, : self.length], 0, end + extra)
            self.values = _regrow(self.values[:, :, : self.length], 0, end + extra)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def take(self, rows: Tensor, cut: int) -> None:
        """Keep only ``rows`` (indices, may repeat) and drop the first ``cut`` columns."""
        length = self.length - cut
        self.keys = _regrow(self.keys[:, :, cut : self.length].index_select(0, rows), 0, length + _SLACK)
        self.values = _regrow(self.values[:, :, cut : self.length].index_select(0, rows), 0, length + _SLACK)
        self.length = length

    def append_rows(self, other: KVLayer) -> None:
        """Put the rows of ``other`` below these; the shorter ones are padded on the left."""
        length = max(self.length, other.length)
        capacity = length + _SLACK
        self.keys = torch.cat(
            [_regrow(x.keys[:, :, : x.length], length - x.length, capacity) for x in (self, other)], dim=0
        )
        self.values = torch.cat(
            [_regrow(x.values[:, :, : x.length], length - x.length, capacity) for x in (self, other)], dim=0
        )
        self.length = length


def _room(states: Tensor, columns: int) -> Tensor:
    batch, heads, _, width = states.shape
    return states.new_zeros(batch, heads, columns + _SLACK, width)


def _regrow(filled: Tensor, left: int, capacity: int) -> Tensor:
    """A copy of ``filled`` [B, heads, L, D] with ``left`` zero columns before it and room behind it."""
    batch, heads, length, width = filled.shape
    buffer = filled.new_zeros(batch, heads, capacity, width)
    buffer[:, :, left : left + length] = filled
    return buffer


class KVCache(Cache):  # type: ignore[misc]
    """All layers of one batch."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[KVLayer() for _ in range(layers)])

    @property
    def length(self) -> int:
        return int(self.layers[0].length)

    def take(self, rows: Tensor, cut: int = 0) -> None:
        for layer in self.layers:
            layer.take(rows, cut)

    def append_rows(self, other: KVCache) -> None:
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append_rows(theirs)

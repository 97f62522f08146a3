"""Key-value memory: stretches of it for one sequence, a prefill's, and that of the running batch.

Invariants: a row's columns are contiguous and its last token lies in the last column, so rows of different lengths
differ in where they begin; what lies before a row's first column is finite and never attended to. A row that leaves
gives its place to the last one at once; nothing else moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_SLACK = 64
"""Columns added when a buffer is full: few enough to waste little, enough that most answers grow seldom."""

Stretch = list[tuple[Tensor, Tensor]]
"""Keys and values of some consecutive tokens of one sequence, [heads, L, D] each, for every layer."""


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers [rows, heads, columns, D], of which ``count`` rows and the columns from ``start`` to ``end``
    are in use."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.start = 0
        self.end = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = key_states, value_states
        self.count, self.end = key_states.shape[0], 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        width = key_states.shape[2]
        if not self.is_initialized:  # a prefill of whole prompts: what was computed is the buffer
            self.lazy_initialization(key_states, value_states)
        else:
            at = slice(self.end, self.end + width)
            self.keys[: self.count, :, at] = key_states
            self.values[: self.count, :, at] = value_states
        self.end += width
        used = slice(self.start, self.end)
        return self.keys[: self.count, :, used], self.values[: self.count, :, used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.end - self.start

    def get_max_length(self) -> int:
        return -1

    def give(self, like: tuple[Tensor, Tensor], rows: int, columns: int, end: int) -> None:
        """Buffers of that size, with what was in use moved so that it ends before column ``end``."""
        kept = self.end - self.start
        keys, values = (one.new_zeros(rows, one.shape[-3], columns, one.shape[-1]) for one in like)
        if self.is_initialized and kept:
            old = slice(self.start, self.end)
            keys[: self.count, :, end - kept : end] = self.keys[: self.count, :, old]
            values[: self.count, :, end - kept : end] = self.values[: self.count, :, old]
        self.device = keys.device
        self.keys, self.values = keys, values
        self.start, self.end = end - kept, end
        self.is_initialized = True


class KVCache(Cache):  # type: ignore[misc]
    """All layers of one batch."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[KVLayer() for _ in range(layers)])

    @property
    def columns(self) -> int:
        """In use."""
        return int(self.layers[0].get_seq_length())

    def cut(self, row: int, first: int, last: int) -> Stretch:
        """Columns ``first`` to ``last``, counted among those in use, of one row; a view."""
        return [
            (
                layer.keys[row, :, layer.start + first : layer.start + last],
                layer.values[row, :, layer.start + first : layer.start + last],
            )
            for layer in self.layers
        ]


class PrefillCache(KVCache):
    """For a pass over several prompts at once, of which each may begin with a stretch that is known already.

    The known columns come first, each row's ending where the new ones begin.
    """

    def __init__(self, layers: int, known: Sequence[tuple[Stretch | None, int]], new_columns: int) -> None:
        """``known``: for every row a stretch and how much of it serves."""
        super().__init__(layers)
        self.known = max(length for _, length in known)
        example = next((stretch for stretch, length in known if stretch and length), None)
        if example is None:
            return
        for number, layer in enumerate(self.layers):
            layer.give(example[number], len(known), self.known + new_columns, self.known)
            layer.start, layer.count = 0, len(known)
            for row, (stretch, length) in enumerate(known):
                if stretch and length:
                    keys, values = stretch[number]
                    layer.keys[row, :, self.known - length : self.known] = keys[:, :length]
                    layer.values[row, :, self.known - length : self.known] = values[:, :length]


class BatchCache(KVCache):
    """The running batch: rows join and leave, all grow by one column a step."""

    @property
    def rows(self) -> int:
        return int(self.layers[0].count)

    def join(self, newcomers: Sequence[tuple[int, Sequence[Stretch]]]) -> None:
        """Rows of a length each, made of stretches one behind the other."""
        rows = self.rows + len(newcomers)
        longest = max(length for length, _ in newcomers)
        self._make_room(newcomers[0][1][0], rows, max(longest, self.columns))
        for number, layer in enumerate(self.layers):
            for row, (length, stretches) in enumerate(newcomers, layer.count):
                at = layer.end - length
                for stretch in stretches:
                    keys, values = stretch[number]
                    layer.keys[row, :, at : at + keys.shape[1]] = keys
                    layer.values[row, :, at : at + keys.shape[1]] = values
                    at += keys.shape[1]
            layer.count = rows
            layer.start = layer.end - max(longest, layer.get_seq_length())

    def leave(self, row: int) -> None:
        """The last row takes the place."""
        for layer in self.layers:
            layer.count -= 1
            if row != layer.count:
                used = slice(layer.start, layer.end)
                layer.keys[row, :, used] = layer.keys[layer.count, :, used]
                layer.values[row, :, used] = layer.values[layer.count, :, used]

    def narrow(self, columns: int) -> None:
        """Use only the last ``columns``: the longest row needs no more."""
        for layer in self.layers:
            layer.start = layer.end - columns

    def prepare_step(self) -> None:
        """Room for one more column."""
        layer = self.layers[0]
        if layer.end == layer.keys.shape[2]:
            self._make_room(None, self.rows, self.columns)

    def _make_room(self, example: Stretch | None, rows: int, columns: int) -> None:
        """For ``rows``, and ``columns`` before the next one. Layer by layer, so little is held twice."""
        for number, layer in enumerate(self.layers):
            if not layer.is_initialized:
                assert example is not None
                like, capacity = example[number], rows
            else:
                capacity, _, width, _ = layer.keys.shape
                if rows <= capacity and columns <= layer.end < width:
                    continue
                like = (layer.keys, layer.values)
                if rows > capacity:
                    capacity = max(rows, capacity + capacity // 2)
                elif 2 * rows < capacity:
                    capacity = rows
            layer.give(like, capacity, columns + max(_SLACK, columns // 4), columns)


def copy_of(stretches: Sequence[Stretch]) -> Stretch:
    """One stretch of its own from several behind each other."""
    if len(stretches) == 1:
        return [(keys.clone(), values.clone()) for keys, values in stretches[0]]
    return [
        (torch.cat([keys for keys, _ in parts], dim=1), torch.cat([values for _, values in parts], dim=1))
        for parts in zip(*stretches, strict=True)
    ]

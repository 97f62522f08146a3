"""What was computed for token sequences before, found again by the longest common beginning.

Invariants: an entry belongs to one policy (the live adapter, or the base alone) and is forgotten when that policy's
weights change; all entries together hold at most ``max_tokens`` tokens, the least recently used leave first. No torch
here: what is kept of a sequence is opaque.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

LEAST_TOKENS = 16
"""A shorter common beginning is not worth its copy."""

Kept = TypeVar("Kept")
Key = tuple[bool, tuple[int, ...]]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix. Slices are compared at C speed, so it is bisected, not walked."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixCache(Generic[Kept]):
    """Use from one thread."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self.tokens = 0

    def longest(self, ids: tuple[int, ...], adapter: bool) -> tuple[Kept | None, int]:
        """The entry with the longest common beginning, and how much of it serves: always less than all of ``ids``,
        because the last token must be computed for what follows it. ``(None, 0)`` if nothing is worth it."""
        best: Key | None = None
        length = LEAST_TOKENS - 1
        for key in self._kept:
            if key[0] == adapter and key[1][:LEAST_TOKENS] == ids[:LEAST_TOKENS]:
                shared = min(common(ids, key[1]), len(ids) - 1)
                if shared > length:
                    best, length = key, shared
        if best is None:
            return None, 0
        self._kept.move_to_end(best)
        return self._kept[best], length

    def wants(self, ids: tuple[int, ...], adapter: bool) -> bool:
        """Whether ``add`` would bring anything."""
        if not LEAST_TOKENS <= len(ids) <= self._max_tokens:
            return False
        return not any(key[0] == adapter and key[1][: len(ids)] == ids for key in self._kept)

    def add(self, ids: tuple[int, ...], adapter: bool, kept: Kept) -> None:
        """Beginnings of the new entry are dropped: it serves in their place."""
        for key in [key for key in self._kept if key[0] == adapter and ids[: len(key[1])] == key[1]]:
            self._drop(key)
        self._kept[adapter, ids] = kept
        self.tokens += len(ids)
        while self.tokens > self._max_tokens:
            self._drop(next(iter(self._kept)))

    def forget(self, adapter: bool) -> None:
        """That policy's weights are others now."""
        for key in [key for key in self._kept if key[0] == adapter]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self._kept[key]
        self.tokens -= len(key[1])

"""How waiting groups become a batch: the oldest groups whose sizes add up to exactly the batch size.

Invariant: if any subset of the waiting groups fits (sum and minimum shares), one is chosen, and of all that fit the one
that is earliest in queue order, compared group by group. So a group that no batch can hold never blocks the others.
No HTTP, no state: indexes in, indexes out. Sets of reachable sums are bit sets in Python integers (bit s = sum s).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def choose_batch(
    sizes: Sequence[int], owners: Sequence[int | None], batch_size: int, minimums: Mapping[int, int]
) -> list[int] | None:
    """Indexes of the chosen groups in queue order, or None while nothing fits.

    ``minimums`` are sequences that a batch must have of an owner; owners without one only fill up.
    """
    if sum(sizes) < batch_size:
        return None
    blocks = {owner: _Block(minimum) for owner, minimum in minimums.items()}
    rest = _Block(0)
    block_of = [blocks.get(owner, rest) if owner is not None else rest for owner in owners]
    everything = [*blocks.values(), rest]
    within = (1 << (batch_size + 1)) - 1
    for size, block in zip(reversed(sizes), reversed(block_of), strict=True):
        block.prepend(size, within)
    if not _fits(everything, batch_size, within):
        return None
    chosen: list[int] = []
    total = 0
    for index, (size, block) in enumerate(zip(sizes, block_of, strict=True)):
        if total == batch_size:
            break
        block.skip()
        if total + size > batch_size:
            continue
        block.taken += size
        if _fits(everything, batch_size, within):
            chosen.append(index)
            total += size
        else:
            block.taken -= size
    return chosen


def exact_subset(sizes: Sequence[int], targets: Sequence[int]) -> list[int] | None:
    """The earliest subset that sums to the first target that any subset reaches."""
    for target in targets:
        if chosen := choose_batch(sizes, [None] * len(sizes), target, {}):
            return chosen
    return None


def minimum_sequences(batch_size: int, shares: Mapping[int, tuple[float, int]]) -> dict[int, int]:
    """Sequences that a batch must have per environment. ``shares``: id to (fraction of the batch, its group size).

    Whole groups only. Shares that add up to more than the batch are scaled down; if they still do not fit after
    rounding, they are rounded down to whole groups, at least one each; if even that is too much, there are none, for a
    batch that can never be formed would stop the training.
    """
    shares = {env: share for env, share in shares.items() if share[0] > 0}
    total = sum(fraction for fraction, _ in shares.values())
    wanted = {env: int(batch_size * fraction / max(1.0, total)) for env, (fraction, _) in shares.items()}
    up = {env: max(1, -(-count // shares[env][1])) * shares[env][1] for env, count in wanted.items()}
    if sum(up.values()) <= batch_size:
        return up
    down = {env: max(1, count // shares[env][1]) * shares[env][1] for env, count in wanted.items()}
    return down if sum(down.values()) <= batch_size else {}


@dataclass(slots=True)
class _Block:
    """The groups that count towards one minimum, in queue order."""

    minimum: int
    taken: int = 0
    reachable: list[int] = field(default_factory=lambda: [1])
    """Last entry: sums that the groups not yet decided on can make; below it those of the groups behind the first."""

    def prepend(self, size: int, within: int) -> None:
        later = self.reachable[-1]
        self.reachable.append((later | later << size) & within)

    def skip(self) -> None:
        self.reachable.pop()

    def sums(self) -> int:
        """What this block can contribute in the end, its minimum kept."""
        return (self.reachable[-1] << self.taken) >> self.minimum << self.minimum


def _fits(blocks: Sequence[_Block], batch_size: int, within: int) -> bool:
    sums = 1
    for block in blocks:
        sums = _pairwise(sums, block.sums() & within) & within
    return bool(sums >> batch_size & 1)


def _pairwise(a: int, b: int) -> int:
    """Sums of one element of each set."""
    if a.bit_count() < b.bit_count():
        a, b = b, a
    result = 0
    while b:
        lowest = b & -b
        result |= a << (lowest.bit_length() - 1)
        b ^= lowest
    return result

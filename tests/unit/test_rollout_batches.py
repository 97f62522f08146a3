"""How groups become a batch: exact sums, oldest first, nothing lost, nothing doubled, minimum shares kept."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.rollout_api.batches import choose_batch, exact_subset, minimum_sequences

SIZES = st.lists(st.integers(1, 6), max_size=9)
BATCH = st.integers(1, 16)


def best_by_trying_all(
    sizes: list[int], owners: list[int | None], batch_size: int, minimums: dict[int, int]
) -> list[int] | None:
    """The earliest fitting subset: of two, the one that has the first group in which they differ."""

    def fits(subset: tuple[int, ...]) -> bool:
        shares = {owner: sum(sizes[i] for i in subset if owners[i] == owner) for owner in minimums}
        enough = all(shares[owner] >= least for owner, least in minimums.items())
        return enough and sum(sizes[i] for i in subset) == batch_size

    indexes = range(len(sizes))
    fitting = [s for count in range(1, len(sizes) + 1) for s in combinations(indexes, count) if fits(s)]
    return list(min(fitting, key=lambda s: [i not in s for i in indexes])) if fitting else None


@given(SIZES, BATCH)
def test_the_batch_is_the_earliest_exact_subset_whenever_there_is_one(sizes: list[int], batch_size: int) -> None:
    owners: list[int | None] = [None] * len(sizes)
    assert choose_batch(sizes, owners, batch_size, {}) == best_by_trying_all(sizes, owners, batch_size, {})


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 0, 1])), max_size=8), BATCH, st.data())
def test_minimum_shares_are_kept_and_the_rest_is_filled_oldest_first(
    groups: list[tuple[int, int | None]], batch_size: int, data: st.DataObject
) -> None:
    minimums = data.draw(st.dictionaries(st.sampled_from([0, 1]), st.integers(0, 8)))
    sizes, owners = [size for size, _ in groups], [owner for _, owner in groups]
    expected = best_by_trying_all(sizes, owners, batch_size, minimums)
    assert choose_batch(sizes, owners, batch_size, minimums) == expected


@given(st.lists(st.integers(1, 5), max_size=40), BATCH)
def test_taking_batches_until_none_is_left_loses_and_doubles_nothing(sizes: list[int], batch_size: int) -> None:
    waiting, taken = list(enumerate(sizes)), []
    while (chosen := choose_batch([s for _, s in waiting], [None] * len(waiting), batch_size, {})) is not None:
        assert sum(waiting[i][1] for i in chosen) == batch_size
        taken += [waiting[i] for i in chosen]
        waiting = [entry for i, entry in enumerate(waiting) if i not in set(chosen)]
    assert sorted(taken + waiting) == list(enumerate(sizes))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 60))
def test_groups_of_one_size_that_divides_the_batch_go_strictly_in_order(size: int, per_batch: int, count: int) -> None:
    chosen = choose_batch([size] * count, [None] * count, size * per_batch, {})
    assert chosen == (list(range(per_batch)) if count >= per_batch else None)


@pytest.mark.parametrize(
    ("sizes", "batch_size", "expected"),
    [
        ([16, 4, 4], 8, [1, 2]),  # a group too large for any batch blocks nobody
        ([3, 4, 4, 3, 2], 8, [0, 3, 4]),  # the oldest is never passed over if it fits at all
        ([3, 3, 3, 4, 4], 8, [3, 4]),
        ([3] * 20, 8, None),
        ([8, 8], 12, None),
        ([], 4, None),
    ],
)
def test_mixed_sizes_are_packed_exactly(sizes: list[int], batch_size: int, expected: list[int] | None) -> None:
    assert choose_batch(sizes, [None] * len(sizes), batch_size, {}) == expected


def test_a_minimum_waits_for_its_owner_and_others_only_fill_up() -> None:
    assert choose_batch([4, 4, 4], [1, 1, None], 8, {0: 4}) is None
    assert choose_batch([4, 4, 4, 4], [1, 1, None, 0], 8, {0: 4}) == [0, 3]
    assert choose_batch([4, 4, 4, 4], [0, 0, 1, 0], 8, {0: 4}) == [0, 1]


def test_a_buffer_is_released_at_the_first_target_that_fits() -> None:
    assert exact_subset([3, 2, 1], [4, 8]) == [0, 2]
    assert exact_subset([3, 3, 3, 3], [4, 8, 12]) == [0, 1, 2, 3]
    assert exact_subset([3, 2], [4, 8]) is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({0: (0.5, 4)}, {0: 8}),
        ({0: (0.3, 4)}, {0: 4}),  # 4.8 sequences: whole groups
        ({0: (0.01, 4)}, {0: 4}),  # at least one group
        ({0: (0.0, 4), 1: (-1.0, 4)}, {}),
        ({0: (0.75, 4), 1: (0.75, 4)}, {0: 8, 1: 8}),  # scaled down
        ({0: (0.7, 8), 1: (0.3, 8)}, {0: 8, 1: 8}),  # rounding up would not fit
        (dict.fromkeys(range(4), (0.25, 8)), {}),  # more minimums than the batch has groups
    ],
)
def test_minimums_become_whole_groups_that_fit_together(
    shares: dict[int, tuple[float, int]], expected: dict[int, int]
) -> None:
    assert minimum_sequences(16, shares) == expected

"""Known beginnings: the longest is found, never stale, never more than there is memory for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.backends.local.prefix import LEAST_TOKENS, PrefixCache, common

A = tuple(range(100))


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 40))
def test_the_common_beginning_is_what_a_walk_finds(a: list[int], b: list[int], shared: int) -> None:
    b = a[:shared] + b
    walked = 0
    while walked < min(len(a), len(b)) and a[walked] == b[walked]:
        walked += 1
    assert common(a, b) == walked


def test_the_longest_beginning_is_found_and_the_last_token_is_always_left_to_compute() -> None:
    cache: PrefixCache[str] = PrefixCache(1000)
    cache.add((*A[:50], 7, 8), True, "short")
    cache.add(A[:80], True, "long")
    assert cache.longest(A, True) == ("long", 80)
    assert cache.longest(A[:80], True) == ("long", 79)
    assert cache.longest((*A[:60], 0), True) == ("long", 60)
    assert cache.longest((*A[:50], 7, 8, 9), True) == ("short", 52)
    assert cache.longest(A[: LEAST_TOKENS - 1] + (-1,) * 50, True) == (None, 0)


def test_the_adapter_and_the_base_know_nothing_of_each_other_and_are_forgotten_apart() -> None:
    cache: PrefixCache[str] = PrefixCache(1000)
    cache.add(A, True, "policy")
    cache.add(A, False, "base")
    assert cache.longest(A, False) == ("base", 99)
    cache.forget(adapter=True)
    assert cache.longest(A, True) == (None, 0)
    assert cache.longest(A, False) == ("base", 99)
    assert cache.tokens == 100


def test_memory_is_bounded_and_the_least_recently_used_leaves() -> None:
    cache: PrefixCache[int] = PrefixCache(100)
    entries = [tuple(range(1000 * number, 1000 * number + 40)) for number in range(3)]
    cache.add(entries[0], True, 0)
    cache.add(entries[1], True, 1)
    cache.longest(entries[0], True)
    cache.add(entries[2], True, 2)
    assert cache.tokens == 80
    assert [cache.longest(entry, True)[0] for entry in entries] == [0, None, 2]
    assert not cache.wants(A + A, True), "larger than all memory"


def test_a_longer_entry_takes_the_place_of_its_beginning() -> None:
    cache: PrefixCache[str] = PrefixCache(1000)
    cache.add(A[:60], True, "turn 1")
    assert cache.wants(A, True)
    cache.add(A, True, "turn 2")
    assert not cache.wants(A[:60], True)
    assert cache.tokens == 100

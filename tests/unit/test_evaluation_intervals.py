"""Intervals of an evaluation: published figures, simulated coverage, and words that never say more than they know."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.envs.intervals import (
    Interval,
    arm_interval,
    difference_interval,
    mean_interval,
    newcombe,
    student_t,
    verdict,
    wilson,
)

TRIALS = 2000
Pairs = tuple[list[float], list[float]]


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 857-872, method 3.
    for (successes, count), expected in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(successes, count) == pytest.approx(expected, abs=5e-5)


def test_newcombes_interval_is_the_published_one() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10: 36 pairs both, 12 and 2 in one arm only, none.
    assert newcombe(both=36, only_second=12, only_first=2, neither=0) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    assert newcombe(both=36, only_second=2, only_first=12, neither=0) == pytest.approx((-0.3404, -0.0569), abs=5e-5)


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.7764), (9, 2.2622), (29, 2.0452), (199, 1.9720)])
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(freedom) == pytest.approx(quantile, rel=4e-3)


def binary(count: int, base: float, gain: float, shared: float) -> Callable[[random.Random], Pairs]:
    """0/1 scores; a ``shared`` part of the items has the same luck on both sides, as the same seed gives."""

    def draw(rng: random.Random) -> Pairs:
        before, after = [], []
        for _ in range(count):
            luck = rng.random()
            other = luck if rng.random() < shared else rng.random()
            before.append(float(luck < base))
            after.append(float(other < base + gain))
        return before, after

    return draw


def graded(count: int, gain: float) -> Callable[[random.Random], Pairs]:
    """Scores in quarters, items of different difficulty."""

    def draw(rng: random.Random) -> Pairs:
        ease = [rng.uniform(0.2, 0.7) for _ in range(count)]

        def score(share: float) -> float:
            return sum(rng.random() < share for _ in range(4)) / 4

        return [score(one) for one in ease], [score(one + gain) for one in ease]

    return draw


@pytest.mark.parametrize(
    ("draw", "truth"),
    [
        pytest.param(binary(30, 0.3, 0.2, 0.0), 0.2, id="30 items"),
        pytest.param(binary(100, 0.35, 0.5, 0.5), 0.5, id="100 items as in the demo"),
        pytest.param(binary(60, 0.9, 0.07, 0.8), 0.07, id="nearly all right"),
        pytest.param(binary(40, 0.1, 0.0, 0.5), 0.0, id="no difference"),
        pytest.param(graded(30, 0.1), 0.1, id="graded"),
        pytest.param(graded(12, 0.25), 0.25, id="few graded"),
    ],
)
def test_95_of_100_intervals_hold_the_true_difference(draw: Callable[[random.Random], Pairs], truth: float) -> None:
    rng = random.Random(7)
    held = 0
    for _ in range(TRIALS):
        low, high = difference_interval(*draw(rng))
        held += low <= truth <= high
    assert 0.935 <= held / TRIALS <= 0.99


def test_intervals_of_one_arm_hold_the_true_accuracy() -> None:
    rng = random.Random(8)
    held = {0.1: 0, 0.5: 0, 0.97: 0}
    for share in held:
        for _ in range(TRIALS):
            low, high = arm_interval([float(rng.random() < share) for _ in range(50)])
            held[share] += low <= share <= high
    assert all(0.93 <= count / TRIALS <= 0.985 for count in held.values()), held


@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_equal_arms_are_called_undetectable_in_about_95_of_100_trials(shared: float) -> None:
    rng = random.Random(9)
    draw = binary(80, 0.4, 0.0, shared)
    words = []
    for _ in range(TRIALS):
        base, adapter = draw(rng)
        interval = difference_interval(base, adapter)
        words.append(verdict((sum(adapter) - sum(base)) / 80, interval).split(" by ")[0].split(" (")[0])
    assert 0.935 <= words.count("no detectable change") / TRIALS <= 0.99
    assert set(words) == {"no detectable change", "improved", "got worse"}


def test_equal_scores_give_an_interval_around_zero_that_shrinks_with_their_number() -> None:
    for scores in ([1.0, 0.0], [0.5, 0.25]):
        few, many = (difference_interval(scores * n, scores * n) for n in (5, 50))
        assert few.low < many.low < 0 < many.high < few.high
        assert verdict(0.0, many).startswith("no detectable change")
    certain = difference_interval([0.0] * 30, [1.0] * 30)
    assert 0.8 < certain.low < 0.9
    assert certain.high == 1.0


def test_scores_on_another_scale_get_an_interval_on_that_scale() -> None:
    base, adapter = [-100.0, -60.0, -80.0, -70.0, -90.0] * 4, [-50.0, -20.0, -30.0, -10.0, -40.0] * 4
    low, high = difference_interval(base, adapter)
    assert -100 < low < 50 < high < 100
    assert low > 0


SCORES = st.sampled_from([0.0, 0.3, 0.5, 1.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(SCORES, SCORES), min_size=2))
def test_an_interval_holds_its_figure_and_stays_on_the_scale(pairs: list[tuple[float, float]]) -> None:
    base, adapter = [before for before, _ in pairs], [after for _, after in pairs]
    difference = fmean(adapter) - fmean(base)
    assert_holds(difference_interval(base, adapter), difference, least=-1.0)
    assert_holds(arm_interval(base), fmean(base), least=0.0)


def assert_holds(interval: Interval, figure: float, *, least: float) -> None:
    assert least <= interval.low < interval.high <= 1
    assert interval.low - 1e-9 <= figure <= interval.high + 1e-9


@pytest.mark.parametrize(
    ("difference", "interval", "words"),
    [
        (0.21, (0.12, 0.30), "improved by 0.21, 95% interval 0.12 to 0.30"),
        (-0.1, (-0.19, -0.02), "got worse by 0.10, 95% interval 0.02 to 0.19"),
        (0.03, (-0.05, 0.11), "no detectable change (difference 0.03, 95% interval -0.05 to 0.11)"),
        (0.2, (0.0, 0.4), "no detectable change (difference 0.20, 95% interval 0.00 to 0.40)"),
        (0.1, (0.001, 0.2), "improved by 0.10, 95% interval 0.001 to 0.20"),
    ],
)
def test_the_verdict_follows_the_interval(difference: float, interval: tuple[float, float], words: str) -> None:
    assert verdict(difference, Interval(*interval)) == words


def test_a_large_difference_that_a_graded_sample_lacks_is_allowed_for() -> None:
    alike = mean_interval([0.1] * 30, (-1.0, 1.0))
    assert alike.low < 0.05
    assert alike.high > 0.15

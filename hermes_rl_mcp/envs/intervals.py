"""95% intervals for the two arms of an evaluation and for their difference, paired by item. Pure; no numpy.

Invariant: each interval holds the figure it belongs to, and has a width however equal the scores are (but where all
are the same number outside of 0 to 1: then nothing is known of their scale).

Scores that are all 0 or 1 get score intervals: Wilson's for an arm, Newcombe's for the difference. Graded scores get
Student's t with a least width (``mean_interval``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

LEVEL = 0.95
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)


class Interval(NamedTuple):
    """Where a figure lies with 95% confidence."""

    low: float
    high: float


def arm_interval(scores_N: Sequence[float]) -> Interval:
    """Of one arm's mean score, N of at least 2 items."""
    if is_binary(scores_N):
        return wilson(round(sum(scores_N)), len(scores_N))
    low, high = _scale(scores_N)
    return mean_interval(scores_N, (low, high))


def difference_interval(base_N: Sequence[float], adapter_N: Sequence[float]) -> Interval:
    """Of the mean of adapter minus base over the same N items, in the same order."""
    if is_binary(base_N) and is_binary(adapter_N):
        pairs = [(round(b), round(a)) for b, a in zip(base_N, adapter_N, strict=True)]
        counts = {pair: pairs.count(pair) for pair in ((1, 1), (0, 1), (1, 0), (0, 0))}
        return newcombe(counts[1, 1], counts[0, 1], counts[1, 0], counts[0, 0])
    low, high = _scale([*base_N, *adapter_N])
    differences_N = [after - before for before, after in zip(base_N, adapter_N, strict=True)]
    return mean_interval(differences_N, (low - high, high - low))


def wilson(successes: int, count: int) -> Interval:
    """The score interval of a proportion p = successes / count (Wilson 1927):

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    share, z2 = successes / count, _Z**2
    centre = share + z2 / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    whole = 1 + z2 / count
    return Interval(max(0.0, (centre - half) / whole), min(1.0, (centre + half) / whole))


def newcombe(both: int, only_second: int, only_first: int, neither: int) -> Interval:
    """The difference of two proportions, second minus first, of the same items: Newcombe 1998, Statistics in Medicine
    17, 2635-2650, method 10 (square-and-add of Wilson's limits, with the continuity-corrected correlation phi).

    With distances dl = p - l and du = u - p of each arm's Wilson limits:
    low = d - sqrt(dl2^2 - 2 phi dl2 du1 + du1^2), high = d + sqrt(du2^2 - 2 phi du2 dl1 + dl1^2)
    """
    count = both + only_second + only_first + neither
    second, first = (both + only_second) / count, (both + only_first) / count
    low2, high2 = wilson(both + only_second, count)
    low1, high1 = wilson(both + only_first, count)
    phi = _phi(both, only_second, only_first, neither)
    down = _added(second - low2, high1 - first, phi)
    up = _added(high2 - second, first - low1, phi)
    difference = second - first
    return Interval(max(-1.0, difference - down), min(1.0, difference + up))


def mean_interval(values_N: Sequence[float], scale: tuple[float, float]) -> Interval:
    """Of the mean of N graded values that lie within ``scale``: Student's t, m +- t_{N-1} s / sqrt(N), but no narrower
    than one further value can move the mean at most: (high - low) / N to either side. So values that happen to be all
    equal do not pass for certainty. Cut to the scale; at least 2 values.
    """
    count, (low, high) = len(values_N), scale
    mean = fmean(values_N)
    half = max(student_t(count - 1) * stdev(values_N) / math.sqrt(count), (high - low) / count)
    return Interval(max(low, mean - half), min(high, mean + half))


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t (for LEVEL), within 0.4% from 4 degrees of freedom on: Abramowitz and Stegun
    26.7.5, an expansion of the normal quantile in powers of 1 / freedom."""
    z, v = _Z, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def verdict(difference: float, interval: Interval) -> str:
    """In words; an interval that holds 0 is never called an improvement."""
    low, high = interval
    if low > 0:
        return f"improved by {_short(difference)}, 95% interval {_short(low)} to {_short(high)}"
    if high < 0:
        return f"got worse by {_short(-difference)}, 95% interval {_short(-high)} to {_short(-low)}"
    return f"no detectable change (difference {_short(difference)}, 95% interval {_short(low)} to {_short(high)})"


def is_binary(scores_N: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores_N)


def _phi(both: int, only_second: int, only_first: int, neither: int) -> float:
    """The correlation of the two arms; 0 where it has no meaning."""
    product = (both + only_second) * (only_first + neither) * (both + only_first) * (only_second + neither)
    if not product:
        return 0.0
    covariance = float(both * neither - only_second * only_first)
    if covariance > 0:
        covariance = max(0.0, covariance - (both + only_second + only_first + neither) / 2)
    return covariance / math.sqrt(product)


def _added(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * phi * one * other + other**2))


def _scale(scores: Sequence[float]) -> tuple[float, float]:
    """0 to 1 if all scores are there, else from the smallest to the largest seen."""
    low, high = min(scores), max(scores)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _short(value: float) -> str:
    """Two places; more where they would hide on which side of 0 it lies."""
    text = f"{value:.2f}"
    return f"{value:.1g}" if value and not float(text) else text

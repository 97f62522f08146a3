"""Scores of a group to advantages: score minus group mean, no division by the standard deviation.

Invariant: a group whose scores differ by no more than ``ZERO_VARIANCE`` has advantages of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

ZERO_VARIANCE = 1e-6
"""Float noise between equal rewards must not become a signal."""


def is_zero_variance(scores_G: Sequence[float]) -> bool:
    return max(scores_G) - min(scores_G) <= ZERO_VARIANCE


def centred(scores_G: Sequence[float]) -> list[float]:
    if is_zero_variance(scores_G):
        return [0.0] * len(scores_G)
    mean = fmean(scores_G)
    return [score - mean for score in scores_G]

"""Axes: which values to label, and how. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_NICE = (1.0, 2.0, 2.5, 5.0, 10.0)


class Axis(NamedTuple):
    """A range, and the values in it that get a label."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def at(self, value: float, begin: float, end: float) -> float:
        """Where ``value`` lies between the coordinates of ``low`` and ``high``."""
        return begin + (end - begin) * (value - self.low) / (self.high - self.low)


def values_axis(low: float, high: float, count: int = 4, *, percent: bool = False) -> Axis:
    """Covers ``low`` to ``high`` in about ``count`` round steps. A flat curve gets room around, one of zeros above."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        room = abs(high) * 0.1
        low, high = (low - room, high + room) if room else (0.0, 1.0)
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, _labels(ticks, step, percent=percent))


def steps_axis(first: int, last: int, count: int = 6) -> Axis:
    """Whole steps, the first and the last of the data at the ends."""
    if last <= first:
        return Axis(first - 0.5, first + 0.5, (float(first),), (str(first),))
    step = max(1, round(_round_step((last - first) / count)))
    ticks = [float(first), *(float(one) for one in range((first // step + 1) * step, last, step)), float(last)]
    room = step * 0.45  # labels at the ends push out those beside them
    kept = [one for one in ticks[1:-1] if one - first > room and last - one > room]
    ticks = [float(first), *kept, float(last)]
    return Axis(float(first), float(last), tuple(ticks), tuple(f"{one:,.0f}" for one in ticks))


def _round_step(least: float) -> float:
    scale = 10.0 ** math.floor(math.log10(least))
    return next(nice * scale for nice in _NICE if nice * scale >= least * (1 - 1e-9))


def _labels(ticks: Sequence[float], step: float, *, percent: bool) -> tuple[str, ...]:
    if percent:
        return tuple(f"{100 * one:.{_decimals(100 * step)}f}%" for one in ticks)
    largest = max(map(abs, ticks))
    if largest >= 1e5 or largest < 1e-3:
        said = (f"{one:.3g}" if abs(one) >= step / 2 else "0" for one in ticks)
        return tuple(one.replace("e-0", "e-").replace("e+0", "e") for one in said)
    decimals = _decimals(step)
    return tuple(f"{one:,.{decimals}f}" if abs(one) >= step / 2 else "0" for one in ticks)


def _decimals(step: float) -> int:
    """As many as tell two neighbours apart."""
    return next((count for count in range(8) if abs(step * 10**count - round(step * 10**count)) < 1e-6), 8)

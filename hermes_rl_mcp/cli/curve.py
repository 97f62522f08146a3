"""The reward curve of a run as text, and what its first and last steps say.

Works on rows of ``(step, metrics)``; where they come from is the caller's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

Rows = Sequence[tuple[int, Mapping[str, JsonValue]]]
WINDOW = 5
"""Steps over which the smooth line averages, and first and last in a run that is long enough."""
_NOT_PARTS = {"reward/mean", "reward/std"}
_WIDTH, _HEIGHT = 72, 14


@dataclass(frozen=True)
class Part:
    """One named part of the reward, averaged over the first and the last steps."""

    name: str
    first: float
    last: float


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values at which the metric ``name`` is a number."""
    pairs = [(step, value) for step, row in rows if (value := _number(row.get(name))) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def reward_parts(rows: Rows) -> list[Part]:
    """Every ``reward/<part>`` beside mean and std, in order of appearance."""
    names = dict.fromkeys(k for _, row in rows for k in row if k.startswith("reward/") and k not in _NOT_PARTS)
    return [part for name in names if (part := _part(rows, name)) is not None]


def mean_reward(rows: Rows) -> Part | None:
    """The mean reward at both ends of the run; None if no step has one."""
    return _part(rows, "reward/mean")


def ends(rows: Rows) -> int:
    """How many steps are the first and the last ones: WINDOW, or in a short run half of them, lest both be the same."""
    return max(1, min(WINDOW, len(rows) // 2))


def _part(rows: Rows, name: str) -> Part | None:
    _, values = series(rows, name)
    if not values:
        return None
    count = ends(rows)
    return Part(name.removeprefix("reward/"), _mean(values[:count]), _mean(values[-count:]))


def draw(rows: Rows, name: str = "reward/mean", *, width: int = _WIDTH) -> str:
    """Dots for the steps, a line for their running mean. Empty if fewer than two steps have the metric."""
    steps, values = series(rows, name)
    if len(steps) < 2:
        return ""
    import plotext  # only who draws pays for it

    figure = plotext.figure
    figure.clear()
    figure.plot_size(max(40, min(width, 100)), _HEIGHT)
    figure.title(f"{name} (dots: each step, line: mean of {WINDOW})")
    figure.label("step", "x")
    figure.ruler("x").ticks(_ticks(steps))
    figure.draw(figure.signal(steps, values, marker="dot"))
    line = figure.signal(steps, _running_mean(values), marker="braille")
    line.lines()
    figure.draw(line)
    # Its colours come with a background of their own, which looks broken on half of all terminals.
    return str(figure.build().string(colorless=True)).rstrip("\n")


def _ticks(steps: Sequence[int]) -> list[int]:
    """First and last step and up to four between them."""
    first, last = steps[0], steps[-1]
    return sorted({first + round((last - first) * i / 5) for i in range(6)})


def _running_mean(values: Sequence[float]) -> list[float]:
    return [_mean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

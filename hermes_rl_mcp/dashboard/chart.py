"""Curves as inline SVG with axes and labels. Colours come from the style sheet: one drawing serves light and dark.

Each point of a curve is the mean of neighbouring steps, with a band from their least to their largest value; a short
run shows every step. The figures behind a curve travel in attributes, from which the script shows the value under
the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from hermes_rl_mcp.contracts.records import ArmScore
from hermes_rl_mcp.dashboard.html import Node, Safe, el
from hermes_rl_mcp.dashboard.scale import Axis, steps_axis, values_axis
from hermes_rl_mcp.dashboard.series import Bucket, Curve
from hermes_rl_mcp.dashboard.words import number, percent

_WIDTH, _HEIGHT = 480, 218
_TOP, _BOTTOM, _RIGHT = 12, 40, 14
_MOST_POINTS = 160
_DOTS_UP_TO = 80
_SMOOTH_SHARE = 20
_SMOOTH_LEAST = 5
_CHAR = 9.2
"""Width of a digit in the labels, a little generous: phones get larger ones."""


class Trace(NamedTuple):
    """One metric of one run."""

    label: str
    curve: Curve
    metric: str
    sparse: bool = False
    """Has values at some steps only: drawn with dots, not smoothed."""


class Chart(NamedTuple):
    """What a chart shows. The last value of a single trace stands in the head, those of several in the legend."""

    title: str
    traces: Sequence[Trace]
    about: str = ""
    percent: bool = False
    from_zero: bool = False
    is_named: bool = False
    """One trace needs its name, too."""

    def said(self, value: float | None) -> str:
        return percent(value) if self.percent else number(value)


class _Drawn(NamedTuple):
    """A trace that has values. Its colour goes by its place in the chart, so that a run has the same one in all."""

    colour: str
    trace: Trace
    points: list[Bucket]


def figure(chart: Chart, *, key: str, mark: int | None = None) -> Safe | None:
    """The chart with head and legend; None while there is nothing to draw. ``mark`` is a step to point out."""
    drawn = [
        _Drawn(f"s{index % 6}", trace, trace.curve.buckets(trace.metric, _MOST_POINTS))
        for index, trace in enumerate(chart.traces)
        if trace.curve.has(trace.metric)
    ]
    if not drawn:
        return None
    is_alone = len(drawn) == 1 and not chart.is_named
    head = el(
        "figcaption",
        el("span", chart.title, class_="chart-title", title=chart.about or None),
        el("span", chart.said(_latest(drawn[0].trace)) if is_alone else None, class_="chart-now"),
    )
    legend = None if is_alone else el("ul", [_legend(chart, one) for one in drawn], class_="legend")
    return el("figure", head, _svg(chart, drawn, mark), legend, class_="chart", id=f"chart-{key}")


def spark(values: Sequence[float]) -> Safe | None:
    """A curve the size of a word."""
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    width, height = 96, 24
    points = [
        f"{2 + (width - 4) * index / (len(values) - 1):.1f},{height - 3 - (height - 6) * (value - low) / spread:.1f}"
        for index, value in enumerate(values)
    ]
    x, y = points[-1].split(",")
    about = f"mean reward from {number(values[0])} to {number(values[-1])}"
    return el(
        "svg",
        el("title", about),
        el("polyline", points=" ".join(points), class_="line s0"),
        el("circle", cx=x, cy=y, r=2.2, class_="dot s0"),
        class_="spark",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=about,
    )


def bar(share: float) -> Safe:
    """How much of something is done, 0 to 1."""
    done = round(1000 * min(max(share, 0.0), 1.0), 1)
    return el(
        "svg",
        el("rect", width=1000, height=8, class_="bar-rest"),
        el("rect", width=done, height=8, class_="bar-done"),
        class_="bar",
        viewBox="0 0 1000 8",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{100 * min(max(share, 0.0), 1.0):.0f} % done",
    )


def arms(base: ArmScore, adapter: ArmScore, *, percents: bool) -> Safe:
    """Two scores with their intervals, one under the other on one axis."""
    shown = percent if percents else number
    low = min(base.low, adapter.low)
    high = max(base.high, adapter.high)
    axis = values_axis(0.0 if percents else low, 1.0 if percents else high, 4, percent=percents)
    left, right, height = 84, 446, 116

    def x(value: float) -> float:
        return round(axis.at(value, left, right), 1)

    rows: list[Node] = []
    for index, (name, arm) in enumerate((("base", base), ("adapter", adapter))):
        y, colour = 24 + 34 * index, f"s{5 if index == 0 else 0}"
        rows += [
            el("text", name, x=left - 12, y=y + 4, class_="label", text_anchor="end"),
            el("line", x1=x(arm.low), x2=x(arm.high), y1=y, y2=y, class_=f"whisker {colour}"),
            el("circle", cx=x(arm.accuracy), cy=y, r=5, class_=f"dot {colour}"),
        ]
    grid = [
        [
            el("line", x1=x(tick), x2=x(tick), y1=6, y2=height - 28, class_="grid"),
            el("text", label, x=x(tick), y=height - 10, class_="label", text_anchor="middle"),
        ]
        for tick, label in zip(axis.ticks, axis.labels, strict=True)
    ]
    about = f"base {shown(base.accuracy)}, adapter {shown(adapter.accuracy)}, with 95 % intervals"
    return el(
        "svg",
        el("title", about),
        grid,
        rows,
        class_="arms",
        viewBox=f"0 0 480 {height}",
        role="img",
        aria_label=about,
    )


def _svg(chart: Chart, drawn: Sequence[_Drawn], mark: int | None) -> Safe:
    every = [bucket for one in drawn for bucket in one.points]
    low, high = min(one.low for one in every), max(one.high for one in every)
    if chart.from_zero or (chart.percent and low < 0.5):
        low = min(low, 0.0)
    if chart.percent and high > 0.5:
        high = max(high, 1.0)
    y_axis = values_axis(low, high, percent=chart.percent)
    first, last = _steps(drawn)
    plot = _Plot(steps_axis(first, last), y_axis, left=round(12 + _CHAR * max(map(len, y_axis.labels))))
    about = _about(chart, drawn)
    return el(
        "svg",
        el("title", about),
        plot.grid(),
        plot.mark(mark) if mark is not None else None,
        [plot.trace(one) for one in drawn],
        class_="plot",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=about,
        data_points=_data(chart, plot, drawn),
    )


class _Plot:
    """The area between the axes."""

    def __init__(self, x_axis: Axis, y_axis: Axis, left: int) -> None:
        self._x_axis, self._y_axis, self.left = x_axis, y_axis, left
        self.right, self.top, self.bottom = _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM

    def x(self, step: float) -> float:
        return round(self._x_axis.at(step, self.left, self.right), 1)

    def y(self, value: float) -> float:
        return round(self._y_axis.at(value, self.bottom, self.top), 1)

    def grid(self) -> list[Node]:
        nodes: list[Node] = []
        for value, label in zip(self._y_axis.ticks, self._y_axis.labels, strict=True):
            y = self.y(value)
            nodes.append(el("line", x1=self.left, x2=self.right, y1=y, y2=y, class_="grid"))
            nodes.append(el("text", label, x=self.left - 8, y=y + 4, class_="label", text_anchor="end"))
        last = len(self._x_axis.ticks) - 1
        for index, (step, label) in enumerate(zip(self._x_axis.ticks, self._x_axis.labels, strict=True)):
            x = self.x(step)
            anchor = "end" if 0 < index == last else "middle"
            nodes.append(el("line", x1=x, x2=x, y1=self.bottom, y2=self.bottom + 4, class_="axis"))
            shift = 4 if anchor == "end" else 0
            nodes.append(el("text", label, x=x + shift, y=self.bottom + 18, class_="label", text_anchor=anchor))
        nodes.append(el("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis"))
        middle = (self.left + self.right) / 2
        nodes.append(el("text", "step", x=middle, y=_HEIGHT - 5, class_="label unit", text_anchor="middle"))
        return nodes

    def mark(self, step: int) -> Node:
        if not self._x_axis.low < step < self._x_axis.high:
            return None
        x = self.x(step)
        about = el("title", f"continued after step {step}")
        return el("line", about, x1=x, x2=x, y1=self.top, y2=self.bottom, class_="mark")

    def trace(self, drawn: _Drawn) -> Node:
        colour, trace, buckets = drawn
        plain = el("path", d=self._path(buckets), class_=f"line {colour}")
        is_fine = len(buckets) <= _DOTS_UP_TO
        if trace.sparse:
            return [plain, self._dots(buckets, 2.6, f"dot {colour}") if is_fine else None]
        dots = self._dots(buckets, 1.9, f"dot raw {colour}")
        if len(trace.curve) < 2 * _SMOOTH_LEAST:
            return [plain, dots]
        window = max(_SMOOTH_LEAST, len(trace.curve) // _SMOOTH_SHARE)
        means = trace.curve.smooth(trace.metric, window)
        steps = sorted(means)
        thin = steps[:: max(1, len(steps) // (2 * _MOST_POINTS))]
        thin = thin if thin[-1] == steps[-1] else [*thin, steps[-1]]
        path = "M" + "L".join(f"{self.x(step)} {self.y(means[step])}" for step in thin)
        behind = dots if is_fine else el("path", d=self._band(buckets), class_=f"band {colour}")
        return [behind, el("path", d=path, class_=f"line {colour}")]

    def _dots(self, buckets: Sequence[Bucket], radius: float, class_: str) -> list[Node]:
        return [el("circle", cx=self.x(one.step), cy=self.y(one.mean), r=radius, class_=class_) for one in buckets]

    def _path(self, buckets: Sequence[Bucket]) -> str:
        return "M" + "L".join(f"{self.x(one.step)} {self.y(one.mean)}" for one in buckets)

    def _band(self, buckets: Sequence[Bucket]) -> str:
        upper = [f"{self.x(one.step)} {self.y(one.high)}" for one in buckets]
        lower = [f"{self.x(one.step)} {self.y(one.low)}" for one in reversed(buckets)]
        return "M" + "L".join(upper + lower) + "Z"


def _legend(chart: Chart, drawn: _Drawn) -> Safe:
    swatch = el(
        "svg",
        el("line", x1=1, x2=17, y1=5, y2=5, class_=f"line {drawn.colour}"),
        viewBox="0 0 18 10",
        class_="swatch",
        aria_hidden="true",
    )
    return el("li", swatch, el("span", drawn.trace.label), el("strong", chart.said(_latest(drawn.trace))))


def _latest(trace: Trace) -> float | None:
    return next((value for value in reversed(trace.curve.values[trace.metric]) if value == value), None)


def _steps(drawn: Sequence[_Drawn]) -> tuple[int, int]:
    steps = [one.trace.curve.steps for one in drawn]
    return min(one[0] for one in steps), max(one[-1] for one in steps)


def _about(chart: Chart, drawn: Sequence[_Drawn]) -> str:
    said = []
    for _, trace, _ in drawn:
        values = [value for value in trace.curve.values[trace.metric] if value == value]
        said.append(f"{trace.label} from {chart.said(values[0])} to {chart.said(values[-1])}")
    first, last = _steps(drawn)
    return f"{chart.title}, steps {first} to {last}: {'; '.join(said)}"


def _data(chart: Chart, plot: _Plot, drawn: Sequence[_Drawn]) -> str:
    """For the script: where each point is and what to say of it."""
    found = [
        {
            "label": trace.label,
            "at": [[plot.x(one.step), plot.y(one.mean), f"{one.step:.0f}", chart.said(one.mean)] for one in points],
        }
        for _, trace, points in drawn
    ]
    return json.dumps({"top": plot.top, "bottom": plot.bottom, "lines": found}, separators=(",", ":"))

"""Axes, curves of files that grow, and markup by construction."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hermes_rl_mcp.dashboard.chart import Chart, Trace, figure, spark
from hermes_rl_mcp.dashboard.html import el, joined
from hermes_rl_mcp.dashboard.scale import steps_axis, values_axis
from hermes_rl_mcp.dashboard.series import Curve, Series
from hermes_rl_mcp.dashboard.words import number, percent
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.quantities import duration, size
from hermes_rl_mcp.runs.store import RunStore

RUN = "0000abcd"
ordinary = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(ordinary, ordinary, st.booleans())
def test_an_axis_covers_the_values_with_a_few_labels_that_differ(one: float, other: float, percents: bool) -> None:
    low, high = min(one, other), max(one, other)
    axis = values_axis(low, high, percent=percents)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(axis.ticks)
    if high - low > 1e-3 * max(abs(low), abs(high)):
        assert len(set(axis.labels)) == len(axis.labels)
        assert all(len(label) <= 16 for label in axis.labels)


@given(st.integers(0, 10_000), st.integers(0, 100_000))
def test_an_axis_of_steps_begins_and_ends_with_the_data(first: int, more: int) -> None:
    axis = steps_axis(first, first + more)
    assert axis.low <= first <= axis.high
    assert all(tick == int(tick) for tick in axis.ticks)
    assert len(set(axis.labels)) == len(axis.labels) <= 9
    gaps = [after - before for before, after in zip(axis.ticks, axis.ticks[1:], strict=False)]
    assert all(gap >= min(1, more) and gap >= more / 20 for gap in gaps)  # room for each label


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.31, 0.92, ("0.2", "0.4", "0.6", "0.8", "1.0")),
        (0.0, 0.0, ("0", "0.25", "0.50", "0.75", "1.00")),
        (2.0, 2.0, ("1.8", "1.9", "2.0", "2.1", "2.2")),
        (1.2e-5, 4.4e-5, ("1e-5", "2e-5", "3e-5", "4e-5", "5e-5")),
        (math.nan, math.inf, ("0", "0.25", "0.50", "0.75", "1.00")),
        (120.0, 4800.0, ("0", "2,000", "4,000", "6,000")),
    ],
)
def test_labels_are_round(low: float, high: float, labels: tuple[str, ...]) -> None:
    assert values_axis(low, high).labels == labels


@given(st.text(), st.text())
def test_text_stays_text_in_elements_and_attributes(text: str, attribute: str) -> None:
    made = el("p", text, ["x", None, 3], title=attribute, hidden=True, class_=None)
    assert made.count("<") == 2
    opening, _, rest = made.partition(">")
    assert opening.count('"') == 2
    assert rest.endswith("x3</p>")
    assert joined([made]) == made


def test_characters_that_nobody_sees_are_written_as_escapes() -> None:
    assert el("p", "a\u202eb\x00", title="\x1b[2J") == '<p title="\\x1b[2J">a\\u202eb\\x00</p>'


def curve_of(steps: int) -> Curve:
    curve = Curve()
    for index in range(1, steps + 1):
        value = None if index % 10 == 0 else math.sin(index / 9)
        curve.add({"step": index, "reward/mean": value, "train/loss": None, "other": "text", "reward/<b>": True})
    return curve


@pytest.mark.parametrize("steps", [1, 2, 9, 60, 5_000])
def test_a_figure_is_well_formed_and_bounded_however_long_the_run(steps: int) -> None:
    curve = curve_of(steps)
    loss = Trace("loss", curve, "train/loss")
    made = figure(
        Chart("Reward & more", [Trace("a <b>", curve, "reward/mean"), loss], percent=True), key="0", mark=steps // 2
    )
    assert made is not None
    root = ElementTree.fromstring(made)
    assert len(made) < 60_000
    [plot] = [one for one in root.iter("svg") if one.get("class") == "plot"]
    data = json.loads(str(plot.get("data-points")))
    assert [line["label"] for line in data["lines"]] == ["a <b>"]
    assert 1 <= len(data["lines"][0]["at"]) <= 160
    for element in plot.iter():
        for name in ("x", "y", "x1", "y1", "cx", "cy"):
            assert 0 <= float(element.get(name) or 0) <= 480, (element.tag, element.attrib)
    assert figure(Chart("Loss", [loss]), key="1") is None


def test_a_spark_needs_two_points_and_a_flat_one_is_drawn() -> None:
    assert spark((1.0,)) is None
    assert spark((1.0, 1.0)) is not None


@pytest.fixture
def series(tmp_path: Path) -> tuple[Series, Path, Path]:
    home = Home(tmp_path)
    paths = home.run(RUN)
    paths.dir.mkdir(parents=True)
    return Series(RunStore(home)), paths.metrics, paths.rollouts


def test_a_curve_is_read_on_and_read_anew_when_the_file_is_another_one(series: tuple[Series, Path, Path]) -> None:
    found, metrics, _ = series
    assert len(found.curve(RUN)) == 0
    assert found.spark(RUN) == ()
    lines = [json.dumps({"step": index, "reward/mean": index / 10}) + "\n" for index in range(1, 6)]
    metrics.write_text("".join(lines[:2]) + lines[2][:9])
    first = found.curve(RUN)
    assert list(first.steps) == [1, 2]
    metrics.write_text("".join(lines))
    assert list(found.curve(RUN).steps) == [1, 2, 3, 4, 5]
    assert list(first.steps) == [1, 2]  # one that is being drawn does not grow
    assert found.spark(RUN) == (0.1, 0.2, 0.3, 0.4, 0.5)
    metrics.write_text(lines[0])
    assert list(found.curve(RUN).steps) == [1]
    metrics.with_name("other").write_text("".join(lines[1:]))
    metrics.with_name("other").rename(metrics)
    assert list(found.curve(RUN).values["reward/mean"]) == [0.2, 0.3, 0.4, 0.5]


def test_figures_beyond_all_measure_are_left_out_of_a_curve(series: tuple[Series, Path, Path]) -> None:
    found, metrics, _ = series
    values = ["0.5", "1.7e308", "-1.7e308", "9" * 400, "1e999", "0.7"]
    lines = [f'{{"step": {step}, "reward/mean": {value}}}\n' for step, value in enumerate(values, 1)]
    metrics.write_text("".join([*lines, f'{{"step": {10**19}, "reward/mean": 1}}\n']))
    curve = found.curve(RUN)
    assert list(curve.steps) == [1, 2, 3, 4, 5, 6]
    assert [bucket.mean for bucket in curve.buckets("reward/mean", 100)] == [0.5, 0.7]
    assert found.spark(RUN) == (0.5, 0.7)


def test_rollouts_are_found_by_step_past_damaged_and_torn_lines(series: tuple[Series, Path, Path]) -> None:
    found, _, rollouts = series
    assert found.rollout_steps(RUN) == []
    whole = [json.dumps({"step": index // 2, "n": index}) + "\n" for index in range(2, 8)]
    rollouts.write_text(whole[0] + "damaged\n" + "".join(whole[1:4]) + whole[4][:5])
    assert found.rollout_steps(RUN) == [1, 2]
    assert found.rollouts(RUN, 1) == [{"step": 1, "n": 2}, {"step": 1, "n": 3}]
    rollouts.write_text(whole[0] + "damaged\n" + "".join(whole[1:]))
    assert found.rollout_steps(RUN) == [1, 2, 3]
    assert [line["n"] for line in found.rollouts(RUN, 3)] == [6, 7]
    assert found.rollouts(RUN, 9) == []


def test_figures_for_people() -> None:
    assert [number(one) for one in (None, math.nan, 0.0, 0.00712, 0.12345, 123.456, 1e-5, 1e6)] == [
        *("\u2013", "\u2013", "0.000", "0.007", "0.123", "123", "1.00e-05", "1.00e+06")
    ]
    assert percent(0.8254) == "82.5 %"
    assert [duration(one) for one in (41.6, 185, 7620, 270_000)] == ["42 s", "3 min 05 s", "2 h 07 min", "3 d 3 h"]
    assert [size(one) for one in (12, 2048, 5_000_000, 3 * 2**30)] == ["12 B", "2.0 KiB", "4.8 MiB", "3.0 GiB"]

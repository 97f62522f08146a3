"""What is drawn of a run, and that it can be drawn whatever its files hold."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor
from plot_parts import drawn_run, evaluated, learning, picture_size

from hermes_rl_mcp.operations import plots
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.plots.curves import read_run
from hermes_rl_mcp.plots.drawing import COLOURS, EVALUATED, LOSS, MAX_RUNS, NAMES, REWARD, draw, figure_of, moving_mean

RUN_ID = "0123abcd"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_lines_that_are_damaged_or_out_of_order_and_values_that_are_no_numbers_are_gaps(home: Home) -> None:
    paths = drawn_run(home, RUN_ID, [])
    paths.metrics.write_text(
        '{"step": 2, "reward/mean": NaN, "train/loss": 0.5}\nnot json\n'
        '{"step": 1, "reward/mean": 0.25, "train/loss": null}\n'
        '[1]\n{"step": true}\n{"step": 3, "reward/mean": "high", "train/loss": Infinity}\n'
        '{"step": 4, "reward/mean": 1e400}\n{"step": 5, "reward/mean": 0.5}\n{"step": 6, "rew'
    )
    run = read_run(paths.dir, NAMES)
    assert run.curves[REWARD].steps_N == [1, 2, 3, 4, 5]
    known = [step for step, value in zip(*vars(run.curves[REWARD]).values(), strict=True) if not math.isnan(value)]
    assert known == [1, 5]
    assert [value for value in run.curves[LOSS].values_N if not math.isnan(value)] == [0.5]
    assert (run.last_step, run.without_loss) == (5, 2)
    assert draw([run])


def test_an_evaluation_is_a_point_where_it_was_made_not_a_line_of_repetitions(home: Home) -> None:
    values = [None, 0.5, 0.5, 0.5, 0.75, 0.75]
    lines = [{"step": step, EVALUATED: value} for step, value in enumerate(values, 1)]
    paths = drawn_run(home, RUN_ID, lines)
    assert read_run(paths.dir, NAMES).curves[EVALUATED].steps_N == [2, 5]
    paths.env_metrics.write_text(
        '{"step": 3, "eval/percent_correct": 0.5}\n{"step": 6, "eval/percent_correct": 0.75}\n'
    )
    assert read_run(paths.dir, NAMES).curves[EVALUATED].steps_N == [3, 6]


def test_a_mean_is_taken_over_what_is_known() -> None:
    nan = math.nan
    assert np.allclose(moving_mean(np.array([1.0, nan, 3.0, 5.0]), 3), [1.0, 2.0, 4.0, 4.0])
    assert np.isnan(moving_mean(np.array([1.0, nan, nan, nan, 1.0]), 3)[2])


@pytest.mark.parametrize("steps", [0, 1, 10_000])
def test_a_run_of_any_length_is_drawn(home: Home, steps: int) -> None:
    paths = drawn_run(home, RUN_ID, learning(steps))
    if steps > 2:
        evaluated(paths, steps)
    picture = draw([read_run(paths.dir, NAMES)])
    assert picture_size(picture) == (960, 720)
    assert len(picture) < 400_000


def test_each_panel_says_what_it_shows_in_which_unit_or_that_there_is_nothing(home: Home) -> None:
    paths = drawn_run(home, RUN_ID, learning(40))
    evaluated(paths, 40)
    figure = figure_of([read_run(paths.dir, NAMES)])
    assert [(axes.get_title("left") or axes.get_title(), axes.get_ylabel()) for axes in figure.axes] == [
        ("Reward", "mean score"),
        ("Accuracy", "correct answers"),
        ("Length of answers", "mean tokens"),
        ("Loss", "policy loss"),
    ]
    legends = [
        [text.get_text() for text in legend.get_texts()] for axes in figure.axes if (legend := axes.get_legend())
    ]
    assert legends == [
        ["each step", "mean of 3 steps"],
        ["in training, mean of 3 steps", "evaluation", "held-out: base, trained"],
    ]
    assert "improved by 0.31" in " ".join(text.get_text() for text in figure.texts)
    empty = figure_of([read_run(drawn_run(home, "00000000", []).dir, NAMES)])
    assert [text.get_text() for axes in empty.axes for text in axes.texts] == ["no steps yet"] * 4


def test_as_many_runs_as_there_are_colours_are_drawn_side_by_side(home: Home) -> None:
    runs = [read_run(drawn_run(home, f"0000000{n}", learning(5 + 10 * n, n)).dir, NAMES) for n in range(MAX_RUNS)]
    assert len(set(COLOURS)) == MAX_RUNS
    picture = Image.open(io.BytesIO(draw(runs))).convert("RGB")
    assert picture.size == (960, 720)
    there = [colour for _, colour in picture.getcolors(960 * 720)]
    for colour in COLOURS:
        wanted = ImageColor.getrgb(colour)
        assert min(math.dist(wanted, other) for other in there) < 12, colour
    for wrong in ([], [*runs, runs[0]]):
        with pytest.raises(ValueError, match="1 to 7"):
            draw(wrong)


def test_the_server_knows_what_is_drawn_and_of_how_many_runs() -> None:
    assert set(plots.CURVES) == set(NAMES)
    assert plots.MAX_RUNS == MAX_RUNS


def test_what_a_run_calls_itself_is_no_formula_and_no_second_line(home: Home) -> None:
    paths = drawn_run(home, RUN_ID, learning(3), environment="$\\frac{$\n" + "long" * 40, base_model="/models/a_{")
    run = read_run(paths.dir, NAMES)
    assert "\n" not in run.environment
    assert (len(run.environment) < 90, run.model) == (True, "a_{")
    assert draw([run, run])


def test_a_run_without_a_readable_record_is_drawn_all_the_same(home: Home) -> None:
    paths = drawn_run(home, RUN_ID, learning(5))
    paths.record.write_text("{")
    paths.evaluation.write_text(json.dumps({"status": "failed"}))
    run = read_run(paths.dir, NAMES)
    assert (run.status, run.held_out, run.last_step) == ("unreadable", None, 5)
    assert draw([run])

"""Draws curves of runs with matplotlib: four panels, light, readable at 800 pixels and by those who see fewer colours.

One run: each step faintly, and over it a mean that shows the trend. Several: a colour, dash and mark for each run, the
same in all panels. Nothing that a run calls itself is read as a formula. Arrays: ``N`` steps.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from hermes_rl_mcp.plots.curves import Curve, HeldOut, RunCurves

REWARD, TRAINED, EVALUATED = "reward/mean", "train/percent_correct", "eval/percent_correct"
LENGTH, LOSS = "rollouts/length_mean", "train/loss"
NAMES = (REWARD, TRAINED, EVALUATED, LENGTH, LOSS)

# Okabe and Ito's colours, which differ for every common kind of colour blindness; their yellow is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)), (0, (1, 1)), (0, (4, 1)))
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
MAX_RUNS = len(COLOURS)
_INK, _QUIET, _GRID = "#222222", "#5A5A5A", "#E2E2E2"
_FEW_TICKS = 6
_LEAST_SPAN = 0.1
_PALETTE = 256
_FAINT, _FAINTER = 0.3, 0.12
_COLUMN_CHARS = 52
"""Of a run's line in the legend, if two are to stand side by side."""
_FEW_STEPS = 30
"""Up to so many values each is marked and no mean is drawn."""
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _QUIET,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "text.color": _INK,
    "text.parse_math": False,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 10,
}


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    name: str
    measure: str = ""
    """Of an evaluation at the end that belongs here."""


_PANELS = (
    _Panel("Reward", "mean score", REWARD, measure="score"),
    _Panel("Accuracy", "correct answers", TRAINED, measure="accuracy"),
    _Panel("Length of answers", "mean tokens", LENGTH),
    _Panel("Loss", "policy loss", LOSS),
)


@dataclass(frozen=True)
class _Look:
    """How one run is told from the others."""

    colour: str
    dashes: Any
    mark: str

    @classmethod
    def of(cls, index: int) -> _Look:
        return cls(COLOURS[index], _DASHES[index], _MARKS[index])


def draw(runs: Sequence[RunCurves]) -> bytes:
    """A PNG of 960 x 720 pixels. ValueError for no run, or more than MAX_RUNS."""
    with rc_context(_STYLE):
        return _png(figure_of(runs))


def figure_of(runs: Sequence[RunCurves]) -> Figure:
    """What ``draw`` makes a picture of. ValueError for no run, or more than MAX_RUNS."""
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"{len(runs)} runs: a picture shows 1 to {MAX_RUNS}")
    figure = Figure(figsize=(9.6, 7.2), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    top = _one_heading(figure, runs[0]) if len(runs) == 1 else _many_heading(figure, runs)
    grid = figure.add_gridspec(2, 2, left=0.085, right=0.975, top=top, bottom=0.08, hspace=0.3, wspace=0.24)
    for number, panel in enumerate(_PANELS):
        axes = figure.add_subplot(grid[divmod(number, 2)])
        _panel(axes, panel, runs)
        axes.set_xlabel("step" if number >= 2 else "")
    return figure


def _png(figure: Figure) -> bytes:
    """Lines on white need few colours; a client has to carry every byte of it as text."""
    pixels, written = io.BytesIO(), io.BytesIO()
    figure.savefig(pixels, format="rgba")
    picture = Image.frombytes("RGBA", figure.canvas.get_width_height(), pixels.getvalue())
    picture.convert("RGB").quantize(_PALETTE, kmeans=1, dither=Image.Dither.NONE).save(written, "png", optimize=True)
    return written.getvalue()


def _one_heading(figure: Figure, run: RunCurves) -> float:
    """Where the panels may begin, as a fraction of the height."""
    figure.text(
        0.02, 0.965, f"Run {run.run_id}: {run.environment} with {run.model}", size=14, weight="bold", va="center"
    )
    of_total = f" of {run.total_steps:,}" if run.total_steps else ""
    said = f"{run.status}, step {run.last_step:,}{of_total}"
    if run.verdict:
        said += f"; held-out items: {run.verdict}"
    figure.text(0.02, 0.928, said, size=11, color=_QUIET, va="center")
    return 0.865


def _many_heading(figure: Figure, runs: Sequence[RunCurves]) -> float:
    """What the runs share is said once."""
    names = {(run.environment, run.model) for run in runs}
    shared = " of {} with {}".format(*next(iter(names))) if len(names) == 1 else ""
    figure.text(0.02, 0.965, f"{len(runs)} runs{shared}", size=14, weight="bold", va="center")
    labels = [
        f"{run.run_id}: {'' if shared else f'{run.environment} with {run.model}, '}{run.status}, step {run.last_step:,}"
        for run in runs
    ]
    handles = [_handle(_Look.of(index)) for index in range(len(runs))]
    columns = 2 if max(map(len, labels)) < _COLUMN_CHARS else 1
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.012, 0.952), ncols=columns, handlelength=4, frameon=False,
        labelspacing=0.3,
    )  # fmt: skip
    return 0.88 - 0.0275 * math.ceil(len(runs) / columns)


def _handle(look: _Look) -> Line2D:
    return Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.mark, markersize=5, linewidth=2)


def _panel(axes: Axes, panel: _Panel, runs: Sequence[RunCurves]) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    alone = len(runs) == 1
    looks = [_Look.of(index) for index in range(len(runs))]
    labels = _labels(panel) if alone else _Labels()
    faint = _FAINT if alone else _FAINTER
    drawn = [_curve(axes, run.curves[panel.name], look, labels, faint) for run, look in zip(runs, looks, strict=True)]
    if panel.name == TRAINED:
        drawn += [_evaluations(axes, run, look, alone=alone) for run, look in zip(runs, looks, strict=True)]
    beside = 0.018 * max(run.last_step for run in runs)
    for index, run in enumerate(runs):
        if run.held_out and run.held_out.measure == panel.measure:
            _held_out(axes, run.held_out, looks[index], alone=alone, shift=beside * (index - (len(runs) - 1) / 2))
            drawn.append(True)
    _scales(axes, panel, runs)
    if not any(drawn):
        _say_empty(axes, panel, runs)
    elif panel.name == LOSS and alone and (without := runs[0].without_loss):
        _note(axes, f"{without:,} {'step' if without == 1 else 'steps'} without a loss")
    elif panel.name == TRAINED and not alone and len(drawn) > len(runs) and any(drawn[len(runs) :]):
        _note(axes, "marks: evaluation; bars: held-out, base and trained")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


@dataclass(frozen=True)
class _Labels:
    """In a panel's legend; empty for none."""

    step: str = ""
    mean: str = ""
    """With the number of steps put in."""


def _labels(panel: _Panel) -> _Labels:
    if panel.name == REWARD:
        return _Labels("each step", "mean of {} steps")
    return _Labels("", "in training, mean of {} steps") if panel.name == TRAINED else _Labels()


def _curve(axes: Axes, curve: Curve, look: _Look, labels: _Labels, faint: float) -> bool:
    """Whether there was a value to draw."""
    steps_N, values_N = np.array(curve.steps_N, dtype=float), np.array(curve.values_N, dtype=float)
    known = int(np.isfinite(values_N).sum())
    if not known:
        return False
    style = {"color": look.colour, "linestyle": look.dashes}
    if known <= _FEW_STEPS:
        label = "in training" if "training" in labels.mean else None
        axes.plot(steps_N, values_N, **style, linewidth=1.8, marker=look.mark, markersize=4.5, label=label)
        return True
    window = 2 * (len(steps_N) // 25) + 1
    axes.plot(steps_N, values_N, color=look.colour, linewidth=0.8, alpha=faint, label=labels.step or None)
    mean = labels.mean.format(window) or None
    axes.plot(steps_N, moving_mean(values_N, window), **style, linewidth=2.2, label=mean)
    return True


def moving_mean(values_N: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Around each step, over those of the ``window`` that have a value; NaN where none has."""
    known_N = np.isfinite(values_N)
    weights = np.ones(window)
    sums_N = np.convolve(np.where(known_N, values_N, 0.0), weights, mode="same")
    counts_N = np.round(np.convolve(known_N.astype(float), weights, mode="same"))
    means_N = np.full(len(values_N), np.nan)
    np.divide(sums_N, counts_N, out=means_N, where=counts_N > 0)
    return means_N


def _evaluations(axes: Axes, run: RunCurves, look: _Look, *, alone: bool) -> bool:
    """The environment's own evaluations during the run: few, so marks."""
    curve = run.curves[EVALUATED]
    if curve.empty:
        return False
    if alone:
        look = _Look(COLOURS[1], "-", "D")
    line = look.dashes if alone else "none"
    axes.plot(
        curve.steps_N, curve.values_N, color=look.colour, linestyle=line, linewidth=1.2, marker=look.mark, markersize=6,
        markeredgecolor="white", label="evaluation" if alone else None,
    )  # fmt: skip
    return True


def _held_out(axes: Axes, found: HeldOut, look: _Look, *, alone: bool, shift: float) -> None:
    """Base at step 0 and adapter at its own step, with 95% intervals. ``shift`` keeps runs beside each other."""
    if alone:
        look = _Look(COLOURS[2], "-", "s")
    arms = (found.base, found.adapter)
    axes.errorbar(
        [shift, max(found.step, 1) + shift],
        [arm.accuracy for arm in arms],
        yerr=[[max(0.0, arm.accuracy - arm.low) for arm in arms], [max(0.0, arm.high - arm.accuracy) for arm in arms]],
        fmt=look.mark, color=look.colour, markersize=6, capsize=4, linewidth=1.8, zorder=4,
        label="held-out: base, trained" if alone else None,
    )  # fmt: skip


def _scales(axes: Axes, panel: _Panel, runs: Sequence[RunCurves]) -> None:
    last = max(1, *(run.last_step for run in runs), *(run.held_out.step for run in runs if run.held_out))
    begin = 0 if any(run.held_out and run.held_out.measure == panel.measure for run in runs) else 1
    room = max(0.4, (0.03 if begin else 0.03 + 0.009 * (len(runs) - 1)) * last)
    axes.set_xlim(begin - room, last + room)
    if last <= _FEW_TICKS:
        axes.set_xticks(range(begin, last + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    low, high = axes.get_ylim()
    least = _LEAST_SPAN if panel.name == TRAINED else _LEAST_SPAN * max(abs(low), abs(high))
    if high - low < least:  # a single value, or noise in the last digits, shall not look like a change
        low, high = (low + high - least) / 2, (low + high + least) / 2
    if panel.name == TRAINED:
        low, high = max(low, -0.03), min(high, 1.03)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    percent = panel.name == TRAINED
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g}%" if percent else f"{y:.4g}"))
    if panel.name == LOSS and low < 0 < high:
        axes.axhline(0, color=_QUIET, linewidth=0.8, zorder=1)


def _note(axes: Axes, text: str) -> None:
    axes.text(
        0.99, 0.03, text, transform=axes.transAxes, ha="right", size=9.5, color=_QUIET,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )  # fmt: skip


def _say_empty(axes: Axes, panel: _Panel, runs: Sequence[RunCurves]) -> None:
    if not any(run.last_step for run in runs):
        text = "no steps yet"
    elif panel.name == LOSS and any(run.without_loss for run in runs):
        text = "no step had a loss"
    else:
        text = "not reported"
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", size=12, color=_QUIET)

"""Which curves are drawn, of one run and of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hermes_rl_mcp.contracts.records import METRIC_NAMES
from hermes_rl_mcp.dashboard.chart import Chart, Trace
from hermes_rl_mcp.dashboard.series import Curve


class Line(NamedTuple):
    """One metric of a chart."""

    metric: str
    label: str
    sparse: bool = False


class Kind(NamedTuple):
    """A chart that any run may have. Its meaning is that of its first metric."""

    title: str
    lines: tuple[Line, ...]
    percent: bool = False
    from_zero: bool = False

    @property
    def about(self) -> str:
        return METRIC_NAMES[self.lines[0].metric]


MAIN = (
    Kind("Reward", (Line("reward/mean", "mean reward"),)),
    Kind(
        "Accuracy",
        (Line("train/percent_correct", "in training"), Line("eval/percent_correct", "evaluation", sparse=True)),
        percent=True,
    ),
    Kind("Answer length, tokens", (Line("rollouts/length_mean", "mean length"),)),
    Kind("Loss", (Line("train/loss", "policy loss"),)),
)
FURTHER = (
    Kind("Gradient norm", (Line("train/grad_norm", "before clipping"),), from_zero=True),
    Kind("Entropy, nats", (Line("train/entropy", "of the policy"),)),
    Kind("Distance from the base model, nats", (Line("train/kl_reference", "k3"),)),
    Kind(
        "Groups and answers lost",
        (
            Line("groups/zero_variance_fraction", "groups of equal scores"),
            Line("rollouts/truncated_fraction", "answers cut by length"),
        ),
        percent=True,
    ),
    Kind("Policy lag, versions", (Line("policy/lag", "mean"),), from_zero=True),
    Kind("Ratio of trainer to sampler", (Line("ratio/mean", "mean"), Line("ratio/max", "largest"))),
    Kind(
        "Time per step, seconds",
        (Line("time/step_s", "step"), Line("time/sample_s", "sampling"), Line("time/train_s", "training")),
        from_zero=True,
    ),
    Kind("Sampled tokens per second", (Line("tokens/sampled_per_s", "while sampling"),), from_zero=True),
    Kind("Largest adapter weight", (Line("train/adapter_max_abs", "in B"),), from_zero=True),
)


def of_one(kinds: Sequence[Kind], curve: Curve) -> list[Chart]:
    """Each kind for one run."""
    return [
        Chart(
            kind.title,
            [Trace(line.label, curve, line.metric, line.sparse) for line in kind.lines],
            kind.about,
            kind.percent,
            kind.from_zero,
        )
        for kind in kinds
    ]


def of_several(curves: dict[str, Curve]) -> list[Chart]:
    """The first metric of each main kind, one trace for each run."""
    return [
        Chart(
            kind.title,
            [Trace(run_id, curve, kind.lines[0].metric) for run_id, curve in curves.items()],
            kind.about,
            kind.percent,
            kind.from_zero,
            is_named=True,
        )
        for kind in MAIN
    ]


def parts_of_reward(curve: Curve) -> list[Chart]:
    """What the environment names as parts of its score, if it does."""
    traces = [Trace(name.removeprefix("reward/"), curve, name) for name in curve.parts if curve.has(name)]
    return (
        [Chart("Parts of the reward", traces, "means of what the environment names as parts", is_named=True)]
        if traces
        else []
    )

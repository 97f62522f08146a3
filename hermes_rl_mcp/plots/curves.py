"""What of a run is drawn: its curves, out of its files alone. Damaged lines and values that are no numbers are gaps.

Lengths: ``N`` steps. No drawing here, and no numpy: a run of 10,000 steps is read in a tenth of a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.records import ArmScore, Evaluation
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.files import opened, read_file
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.untrusted import shown

_LABEL_CHARS = 48
_EVAL = "eval/percent_correct"
_MAX_LINE_BYTES = 2**20
_MOST, _MOST_STEPS = 1e300, 2**53
"""What is beyond is no figure that could be drawn."""


@dataclass(frozen=True)
class Curve:
    """Values by step, oldest first; NaN where a step has none."""

    steps_N: list[int] = field(default_factory=list)
    values_N: list[float] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return all(math.isnan(value) for value in self.values_N)


@dataclass(frozen=True)
class HeldOut:
    """The evaluation at the end of the run: base and adapter with their 95% intervals."""

    base: ArmScore
    adapter: ArmScore
    step: int
    measure: str


@dataclass(frozen=True)
class RunCurves:
    """Everything a picture shows of one run."""

    run_id: str
    environment: str
    model: str
    status: str
    total_steps: int
    last_step: int
    """0 before the first one."""
    curves: dict[str, Curve]
    without_loss: int
    """Steps whose batch had no signal, or whose loss was no number: both are null in the file."""
    held_out: HeldOut | None = None
    verdict: str = ""


def read_run(folder: Path, names: tuple[str, ...]) -> RunCurves:
    """One run directory. A record that cannot be read leaves its names out; the curves are drawn all the same."""
    paths = RunPaths(folder)
    lines = {line["step"]: line for line in _lines(paths.metrics)}  # a step that was written twice counts once
    steps_N = sorted(lines)
    curves = {name: Curve(steps_N, [_number(lines[step].get(name)) for step in steps_N]) for name in names}
    if _EVAL in names:
        curves[_EVAL] = _evaluations(paths) or _changes(curves[_EVAL])
    record = _record(paths)
    verdict, held_out = _held_out(paths)
    return RunCurves(
        run_id=paths.run_id,
        environment=_label(record.environment if record else "unknown environment"),
        model=_label(record.base_model if record else "unknown model"),
        status=record.status.value if record else "unreadable",
        total_steps=record.total_steps if record else 0,
        last_step=steps_N[-1] if steps_N else 0,
        curves=curves,
        without_loss=sum("train/loss" in line and line["train/loss"] is None for line in lines.values()),
        held_out=held_out,
        verdict=verdict,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects with a step above 0. A torn last line, or one that a power failure damaged, is left out."""
    try:
        with opened(path) as file:
            while line := file.readline(_MAX_LINE_BYTES):
                try:
                    found = json.loads(line, parse_constant=lambda _: None)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict) and type(found.get("step")) is int and 0 < found["step"] < _MOST_STEPS:
                    yield found
    except OSError:  # nothing written yet
        return


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if abs(number) <= _MOST else math.nan  # no infinity, and no difference that is one


def _evaluations(paths: RunPaths) -> Curve | None:
    """The environment's own evaluations, each at its step."""
    found = {line["step"]: _number(line.get(_EVAL)) for line in _lines(paths.env_metrics) if _EVAL in line}
    steps = sorted(step for step, value in found.items() if not math.isnan(value))
    return Curve(steps, [found[step] for step in steps]) if steps else None


def _changes(curve: Curve) -> Curve:
    """The trainer repeats the last evaluation in every line: what counts is where it changes."""
    steps: list[int] = []
    values: list[float] = []
    for step, value in zip(curve.steps_N, curve.values_N, strict=True):
        if not math.isnan(value) and (not values or value != values[-1]):
            steps.append(step)
            values.append(value)
    return Curve(steps, values)


def _record(paths: RunPaths) -> RunRecord | None:
    try:
        return RunRecord.model_validate_json(read_file(paths.record))
    except (OSError, ValidationError):
        return None


def _held_out(paths: RunPaths) -> tuple[str, HeldOut | None]:
    try:
        found = Evaluation.model_validate_json(read_file(paths.evaluation))
    except (OSError, ValidationError):
        return "", None
    if found.status != "completed" or found.base is None or found.adapter is None:
        return "", None
    return shown(found.verdict, 120), HeldOut(found.base, found.adapter, found.step, found.measure)


def _label(text: str) -> str:
    """A name that somebody else chose, on one line. A model's folder is known by its last part."""
    name = text.rstrip("/").rsplit("/", 1)[-1] if text.startswith("/") else text
    return shown(name.replace("\n", " "), _LABEL_CHARS)

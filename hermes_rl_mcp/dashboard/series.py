"""A run's growing files, read on from where the last look ended, so that a page of a long run is quick to refresh.

Kept in memory only for the runs looked at last; everything can be read anew.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from hermes_rl_mcp.contracts.records import METRIC_NAMES
from hermes_rl_mcp.files import opened
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs.json_lines import json_object
from hermes_rl_mcp.runs.store import RunStore

_RUNS = 8
"""Kept at a time: ten thousand steps of thirty metrics are some megabytes."""
_MOST_PARTS = 6
"""Parts of a reward: an environment may name hundreds."""
_CHUNK_BYTES = 4 * 2**20
_STEP_BYTES = 2 * 2**20
"""Of one step's rollouts."""
_SMALL_BYTES = 2 * 2**20
_FAR = 2**53
"""No run has so many steps; further on they do not fit."""
_SPARK_POINTS, _SPARK_RECENT, _SPARKS = 48, 240, 256


class Bucket(NamedTuple):
    """Neighbouring steps drawn as one point."""

    step: float
    mean: float
    low: float
    high: float


@dataclass
class Curve:
    """Metrics by step; NaN where a step has none."""

    offset: int = 0
    inode: int = 0
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: dict[str, array[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def parts(self) -> list[str]:
        """Metrics that are parts of the reward, in the order in which they came."""
        return [name for name in self.values if name not in METRIC_NAMES]

    def has(self, name: str) -> bool:
        """Whether any step has a value of it."""
        return any(value == value for value in self.values.get(name, ()))

    def add(self, line: dict[str, object]) -> None:
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > _FAR:
            return
        for name in line:
            if name not in self.values and self._wanted(name):
                self.values[name] = array("d", [math.nan] * len(self.steps))
        self.steps.append(step)
        for name, column in self.values.items():
            value = line.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            column.append(float(value) if is_number else math.nan)  # type: ignore[arg-type]  # just asked

    def _wanted(self, name: str) -> bool:
        return name in METRIC_NAMES or (name.startswith("reward/") and len(self.parts) < _MOST_PARTS)

    def buckets(self, name: str, most: int) -> list[Bucket]:
        """At most ``most`` points with their spread; steps without a value are left out."""
        column = self.values.get(name, array("d"))
        width = max(1, math.ceil(len(self.steps) / most))
        found = []
        for begin in range(0, len(column), width):
            some = [value for value in column[begin : begin + width] if math.isfinite(value)]
            if some:
                steps = self.steps[begin : begin + width]
                found.append(Bucket(sum(steps) / len(steps), sum(some) / len(some), min(some), max(some)))
        return found

    def smooth(self, name: str, window: int) -> dict[float, float]:
        """Mean of the last ``window`` values at each step that has one."""
        column = self.values.get(name, array("d"))
        last: deque[float] = deque()
        total = 0.0
        found: dict[float, float] = {}
        for step, value in zip(self.steps, column, strict=True):
            if math.isfinite(value):
                last.append(value)
                total += value
                if len(last) > window:
                    total -= last.popleft()
                found[float(step)] = total / len(last)
        return found


class _Place(NamedTuple):
    begin: int
    end: int


@dataclass
class RolloutPlaces:
    """Where in rollouts.jsonl the lines of each step are."""

    offset: int = 0
    inode: int = 0
    steps: dict[int, _Place] = field(default_factory=dict)


class _Followed(Protocol):
    offset: int
    inode: int


K = TypeVar("K", bound=_Followed)


class _Last(Generic[K]):
    """Of the runs looked at last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, K] = OrderedDict()

    def get(self, run_id: str, fresh: K, size: int, inode: int) -> K:
        """What is known of the run, or ``fresh`` if nothing is or the file is another one by now."""
        kept = self._kept.pop(run_id, fresh)
        if kept.inode != inode or kept.offset > size:
            kept = fresh
            kept.inode = inode
        self._kept[run_id] = kept
        while len(self._kept) > _RUNS:
            self._kept.popitem(last=False)
        return kept


class Series:
    """Curves and rollouts of the runs of one home. Safe to use from several threads."""

    def __init__(self, runs: RunStore) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._curves: _Last[Curve] = _Last()
        self._places: _Last[RolloutPlaces] = _Last()
        self._sparks: OrderedDict[str, tuple[int, tuple[float, ...]]] = OrderedDict()

    def curve(self, run_id: str) -> Curve:
        """All steps so far."""
        with self._lock:
            try:
                found = self._runs.paths(run_id).metrics.stat()
            except FileNotFoundError:
                return Curve()
            kept = self._curves.get(run_id, Curve(), found.st_size, found.st_ino)
            while (part := self._runs.metrics(run_id, kept.offset)).offset > kept.offset:
                for line in part.lines:
                    kept.add(line)
                kept.offset = part.offset
            return Curve(steps=kept.steps[:], values={name: column[:] for name, column in kept.values.items()})

    def spark(self, run_id: str) -> tuple[float, ...]:
        """Mean reward in a few points: of the whole run, or of its last steps where it is very long."""
        with self._lock:
            try:
                size = self._runs.paths(run_id).metrics.stat().st_size
            except FileNotFoundError:
                return ()
            known = self._sparks.pop(run_id, None)
            if known is None or known[0] != size:
                known = (size, self._spark(run_id, size))
            self._sparks[run_id] = known
            while len(self._sparks) > _SPARKS:
                self._sparks.popitem(last=False)
            return known[1]

    def _spark(self, run_id: str, size: int) -> tuple[float, ...]:
        is_small = size <= _SMALL_BYTES
        lines = self._runs.metrics(run_id).lines if is_small else self._runs.recent(run_id, _SPARK_RECENT)
        curve = Curve()
        for line in lines:
            curve.add({"step": line.get("step"), "reward/mean": line.get("reward/mean")})
        return tuple(bucket.mean for bucket in curve.buckets("reward/mean", _SPARK_POINTS))

    def rollout_steps(self, run_id: str) -> list[int]:
        """Steps of which rollouts were kept, in order."""
        with self._lock:
            return sorted(self._look(self._runs.paths(run_id), run_id).steps)

    def rollouts(self, run_id: str, step: int) -> list[dict[str, object]]:
        """The lines of one step."""
        paths = self._runs.paths(run_id)
        with self._lock:
            place = self._look(paths, run_id).steps.get(step)
        if place is None:
            return []
        with opened(paths.rollouts) as file:
            file.seek(place.begin)
            data = file.read(min(place.end - place.begin, _STEP_BYTES))
        found = (json_object(line) for line in data.splitlines())
        return [one for one in found if one is not None and one.get("step") == step]

    def _look(self, paths: RunPaths, run_id: str) -> RolloutPlaces:
        try:
            with opened(paths.rollouts) as file:
                found = paths.rollouts.stat()
                kept = self._places.get(run_id, RolloutPlaces(), found.st_size, found.st_ino)
                file.seek(kept.offset)
                while data := file.read(_CHUNK_BYTES):
                    whole = data.rfind(b"\n") + 1
                    if not whole:  # torn, or a line of more than a chunk, which nobody of us writes
                        break
                    self._note(kept, data[:whole])
                    file.seek(kept.offset)
                return kept
        except OSError:  # not there yet
            return RolloutPlaces()

    @staticmethod
    def _note(kept: RolloutPlaces, data: bytes) -> None:
        for line in data.splitlines(keepends=True):
            end = kept.offset + len(line)
            step = (json_object(line) or {}).get("step")
            if isinstance(step, int):
                known = kept.steps.get(step)
                kept.steps[step] = _Place(known.begin if known else kept.offset, end)
            kept.offset = end

"""How long requests to an endpoint took, under Atropos' metric names. Training and evaluation are told apart."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Timings:
    """Of the newest ``length`` requests of each kind that were answered, in seconds, retries included."""

    def __init__(self, length: int) -> None:
        self._seconds = {"": deque[float](maxlen=length), "eval_": deque[float](maxlen=length)}

    @contextmanager
    def of(self, split: str) -> Iterator[None]:
        """Around one request; one that fails is not counted."""
        began = time.monotonic()
        yield
        self._seconds["eval_" if split == "eval" else ""].append(time.monotonic() - began)

    def metrics(self, prefix: str) -> dict[str, float]:
        """``<prefix>_request_time_avg``, ``_std``, ``_99p``, and the same with ``eval_request_time``."""
        found: dict[str, float] = {}
        for kind, seconds in self._seconds.items():
            if seconds:
                name = f"{prefix}_{kind}request_time"
                found |= {f"{name}_avg": statistics.fmean(seconds), f"{name}_std": statistics.pstdev(seconds)}
                found[f"{name}_99p"] = percentile(seconds, 0.99)
        return found


def percentile(values: Sequence[float] | deque[float], share: float) -> float:
    """Between the two nearest values linearly, as numpy does it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

"""Compares what was said of a run with what it took, on a machine that others use as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FIGURES = ("memory_bytes", "disk_bytes", "sampled_tokens", "seconds_per_step", "total_seconds")
TIMES = ("seconds_per_step", "total_seconds")


async def dry_run(call: Callable[..., Any]) -> dict[str, Any]:
    estimate: dict[str, Any] = (await call("rl_start_training", dry_run=True))["estimate"]
    return estimate


def assert_within_a_factor_of_two(actual: dict[str, Any], *estimates: dict[str, Any]) -> None:
    """Memory, disk and tokens by each estimate; times by the range of estimates made before and after the run, because
    the machine may have been busier at one time than at the other."""
    for name in FIGURES:
        said = [one[name] - (one["fetch_bytes"] if name == "disk_bytes" else 0) for one in estimates]
        assert actual[name] is not None, (name, actual)
        low, high = (min(said), max(said)) if name in TIMES else (max(said), min(said))
        assert low / 2 <= actual[name] <= high * 2, (name, actual[name], said, estimates)

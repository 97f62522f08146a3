"""Estimates and what came of them, in units that people read. One line each."""

from __future__ import annotations

from hermes_rl_mcp.contracts.estimates import Actual, Estimate
from hermes_rl_mcp.quantities import size

_UNKNOWN = "unknown"


def expected(estimate: Estimate) -> list[str]:
    """For a run that has yet to begin."""
    fetched = f", {size(estimate.fetch_bytes)} of it the model" if estimate.fetch_bytes else ""
    lines = [f"estimate ({estimate.basis}):", f"  memory {size(estimate.memory_bytes)}"]
    if estimate.gpu_memory_bytes is not None:
        lines.append(f"  GPU memory {size(estimate.gpu_memory_bytes)}")
    return [
        *lines,
        f"  disk {size(estimate.disk_bytes)}{fetched}",
        f"  start-up {duration(estimate.startup_seconds)}, then {duration(estimate.seconds_per_step)} per step",
        f"  time in all {duration(estimate.total_seconds)}",
        f"  sampled tokens {count(estimate.sampled_tokens)}",
    ]


def compared(estimate: Estimate | None, actual: Actual | None) -> list[str]:
    """Estimate beside what it took; rows without a measured figure are left out."""
    if actual is None:
        return []
    said = _said(estimate)
    rows = [
        ("memory", amount(said.memory_bytes), amount(actual.memory_bytes)),
        ("GPU memory", amount(said.gpu_memory_bytes), amount(actual.gpu_memory_bytes)),
        ("disk", amount(said.disk_bytes), amount(actual.disk_bytes)),
        ("start-up", duration(said.startup_seconds), duration(actual.startup_seconds)),
        ("per step", duration(said.seconds_per_step), duration(actual.seconds_per_step)),
        ("time in all", duration(said.total_seconds), duration(actual.total_seconds)),
        ("sampled tokens", count(said.sampled_tokens), count(actual.sampled_tokens)),
    ]
    lines = [f"  {name} {before} / {after}" for name, before, after in rows if after != _UNKNOWN]
    return ["estimate / actual:", *lines] if lines else []


def _said(estimate: Estimate | None) -> Actual:
    """The estimate in the same figures; all unknown if there was none."""
    if estimate is None:
        return Actual()
    values = estimate.model_dump(include=set(Actual.model_fields))
    return Actual.model_validate({**values, "disk_bytes": estimate.disk_bytes - estimate.fetch_bytes})


def amount(bytes_: int | None) -> str:
    """Bytes, where they are known."""
    return _UNKNOWN if bytes_ is None else size(bytes_)


def duration(seconds: float | None) -> str:
    """``0.24 s``, ``36 s``, ``7 min``, ``2.5 h``."""
    if seconds is None:
        return _UNKNOWN
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.1f} min" if minutes < 10 else f"{minutes:.0f} min"
    return f"{minutes / 60:.1f} h"


def count(number: int | None) -> str:
    """``5,900``, ``1.2 million``."""
    if number is None:
        return _UNKNOWN
    return f"{number / 1e6:.1f} million" if number >= 1_000_000 else f"{number:,}"

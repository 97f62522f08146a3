"""Numbers and stamps as a person reads them."""

from __future__ import annotations

import math
from datetime import datetime

from hermes_rl_mcp.dashboard.html import Safe, el

NONE = "–"  # noqa: RUF001  # the usual sign for "no value" in a table


def number(value: float | None) -> str:
    """Three decimals, or three digits where that says nothing."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return f"{value:.2e}"


def percent(value: float | None) -> str:
    """A fraction, 0 to 1."""
    return NONE if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def moment(stamp: str | None) -> Safe | str:
    """An ISO time as this machine's clock shows it."""
    try:
        local = datetime.fromisoformat(stamp or "").astimezone()
    except (ValueError, OverflowError):
        return NONE
    return el("time", f"{local:%b} {local.day}, {local:%H:%M}", datetime=stamp, title=f"{local:%Y-%m-%d %H:%M:%S %Z}")


def clock(stamp: str | None) -> Safe | str:
    """The time of day alone, with seconds."""
    try:
        local = datetime.fromisoformat(stamp or "").astimezone()
    except (ValueError, OverflowError):
        return NONE
    return el("time", f"{local:%H:%M:%S}", datetime=stamp, title=f"{local:%Y-%m-%d %H:%M:%S %Z}")

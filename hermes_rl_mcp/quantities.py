"""Spans of time and amounts of bytes as a person reads them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 07 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def size(count: float) -> str:
    """Bytes: ``5.2 GiB``, ``310 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" and count < 10 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB" if count < 10 else f"{count:.0f} TiB"

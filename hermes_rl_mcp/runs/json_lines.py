"""A line of metrics or rollouts, read so that no figure in it can upset whoever computes with it.

Invariant: a number from here is finite, and so is the difference of any two.
"""

from __future__ import annotations

import json
from typing import Any

_MOST = 1e300
_MOST_DIGITS = 300
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")


def may_be_large(data: bytes) -> bool:
    """Whether a number in these lines may be too large. Quick, because most lines have none."""
    alike = data.translate(_ALIKE, delete=b"+")
    return b"e000" in alike or b"0" * _MOST_DIGITS in alike


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """None for a line that is torn or was damaged by a power failure; the lines around it still count.

    What only Python's JSON can hold (NaN, infinity) is null, as our own trainer writes it; so is what is too large.
    """
    try:
        found = _JSON.decode(line if isinstance(line, str) else line.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _whole(text: str) -> int | None:
    return int(text) if len(text) < _MOST_DIGITS else None


def _fraction(text: str) -> float | None:
    number = float(text)
    return number if -_MOST <= number <= _MOST else None


_JSON = json.JSONDecoder(parse_constant=lambda _: None, parse_int=_whole, parse_float=_fraction)

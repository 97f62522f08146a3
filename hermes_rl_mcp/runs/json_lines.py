"""A line of metrics or rollouts, read so that no figure in it can upset whoever computes with it.

Invariant: a number from here is finite, and so is the difference of any two.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MOST = 1e300
_MOST_DIGITS = 300
UNUSUAL = re.compile(rb"[0-9]{300}|[eE]\+?[0-9]{3}")
"""Only in a line with such a place a number may be too large."""


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

"""Keeps an answer to a size that a model can read and a client takes.

Rows that do not fit are left for the next page. Whatever is still too long has its long values cut, and says so: no
answer is ever beyond ``ANSWER_CHARS``, whatever a run, a file or an environment holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from hermes_rl_mcp.untrusted import shown, shown_values

ANSWER_CHARS = 20_000
"""Of an answer's data as JSON: under 8,000 tokens also where it is mostly figures, at 2.5 characters a token."""
PAGE_CHARS = 16_000
"""Of the rows of one page, which leaves room for what an answer says besides."""
_STRING_CHARS = (1_000, 400, 150, 60)
"""Longest string, step by step, until the whole fits."""
_LIST_ROWS = (100, 40, 15, 5)
"""Longest list, likewise, once strings were cut."""
_FREE_KEYS = 60
"""No model of ours has so many fields: what has more is free data, of which some can be left out."""
_DIGITS = 6
_PARTS = ("sections", "source", "dataset")
_WHOLE = ("untrusted", "run_id", "next_offset")
"""Never cut."""


class Slice(NamedTuple):
    """Rows from ``first`` on, and where the next page begins; None if these are the last ones."""

    first: int
    last: int
    next_offset: int | None


def content(result: BaseModel) -> dict[str, Any]:
    """What a program is given: JSON data, escaped, short enough. Parts that were asked for come as they are: whoever
    read them kept them within their share, with an offset at which to go on."""
    values = result.model_dump(mode="json")
    parts = {name: values.pop(name) for name in _PARTS if values.get(name) is not None}
    left = ANSWER_CHARS - (size(parts) if parts else 0)
    return {**fitted(shown_values(values), left), **shown_values(parts, ANSWER_CHARS)}


def sliced(sizes: Sequence[int], offset: int, limit: int, budget: int = PAGE_CHARS) -> Slice:
    """Which of so many rows of these sizes make a page: one at least, at most ``limit`` (0 = as many as fit)."""
    first = min(max(0, offset), len(sizes))
    most = min(len(sizes), first + limit) if limit > 0 else len(sizes)
    last, left = first, budget
    while last < most and (last == first or left >= sizes[last]):
        left -= sizes[last]
        last += 1
    return Slice(first, last, last if last < len(sizes) else None)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced indices below ``count``, the first and the last included."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def size(value: Any) -> int:
    """Characters as JSON."""
    return len(json.dumps(value, ensure_ascii=False, default=str))


def rounded(value: Any) -> Any:
    """A copy of JSON-like data with measured figures to six digits; a model has to read them."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def fitted(content: dict[str, Any], budget: int = ANSWER_CHARS) -> dict[str, Any]:
    """``content`` if it fits, else with long strings and lists cut and ``truncated`` set."""
    if size(content) <= budget:
        return content
    for chars in _STRING_CHARS:
        cut = _cut(content, chars, None)
        if size(cut) <= budget:
            return {**cut, "truncated": True}
    for rows in _LIST_ROWS:
        cut = _cut(content, _STRING_CHARS[-1], rows)
        if size(cut) <= budget:
            break
    return {**cut, "truncated": True}


def _cut(value: Any, chars: int, rows: int | None) -> Any:
    if isinstance(value, str):
        return shown(value, chars)
    if isinstance(value, dict):
        items = list(value.items())
        if rows is not None and len(items) > _FREE_KEYS:
            items = items[: max(rows, 1)]
        return {shown(key, chars): item if key in _WHOLE else _cut(item, chars, rows) for key, item in items}
    if isinstance(value, list | tuple):
        return [_cut(item, chars, rows) for item in (value if rows is None else value[:rows])]
    return value

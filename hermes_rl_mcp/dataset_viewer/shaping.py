"""Rows as they can be shown: JSON values of bounded size, and what their columns hold.

Everything in a row is somebody's text: hidden characters come as escapes, and what is cut says how much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pydantic import JsonValue

from hermes_rl_mcp.contracts.datasets import DatasetColumn, DatasetInfo, DatasetSplit, ViewRequest
from hermes_rl_mcp.untrusted import shown

MAX_COLUMNS = 100
MAX_SPLITS, MAX_FILES, MAX_CONFIGS = 20, 3, 30
_COLUMNS_CHARS = 5_000
_LEAST_CHARS = 2_000
"""For rows, however much there is besides."""
_NAME_CHARS, _TYPE_CHARS = 100, 200
_ROUNDS = ((1_500, 20), (400, 8), (100, 3), (30, 1))
"""Characters of a text and items of a list, from generous to tight: the first with which one row fits is taken."""
_DEPTH = 6
_FIELDS = 12
"""Of an object in a type's name."""


def _narrowed(row: dict[str, JsonValue], budget_chars: int) -> dict[str, JsonValue]:
    """A row of very many columns without its last ones."""
    kept: dict[str, JsonValue] = {}
    left = budget_chars - _size({"…": "[100 more columns]"})
    for name, value in row.items():
        left -= _size({name: value})
        if left < 0:
            return {**kept, "…": f"[{len(row) - len(kept)} more columns]"}
        kept[name] = value
    return kept


def complete(fields: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], request: ViewRequest) -> DatasetInfo:
    """The answer: ``fields`` say all but the rows; of ``rows``, which begin at the request's offset, those that were
    asked for and fit."""
    bare = DatasetInfo.model_validate({**fields, "rows": []})
    left = request.budget_chars - len(bare.model_dump_json())
    shaped = fitted(rows[: request.limit], max(left, _LEAST_CHARS))
    more = len(shaped) < len(rows)
    return bare.model_copy(
        update={
            "rows": shaped,
            "offset": request.offset,
            "truncated": len(shaped) < min(request.limit, len(rows)),
            "next_offset": request.offset + len(shaped) if more else None,
        }
    )


def some(names: Sequence[str], most: int) -> list[str]:
    """The first of them, and how many there are besides."""
    return [*names[:most], *([f"… [{len(names) - most} more]"] if len(names) > most else [])]


def some_splits(splits: Sequence[DatasetSplit]) -> list[DatasetSplit]:
    """The same for splits."""
    rest = len(splits) - MAX_SPLITS
    return [*splits[:MAX_SPLITS], *([DatasetSplit(name=f"… [{rest} more]")] if rest > 0 else [])]


def fitted(rows: Sequence[Mapping[str, Any]], budget_chars: int) -> list[dict[str, JsonValue]]:
    """As many of the first rows as fit, but one at least."""
    if not rows:
        return []
    for max_chars, max_items in _ROUNDS:
        shaped = [_shaped_row(row, max_chars, max_items) for row in rows]
        if _size(shaped[0]) <= budget_chars:
            break
    kept = [_narrowed(shaped[0], budget_chars)]
    left = budget_chars - _size(kept[0])
    for row in shaped[1:]:
        left -= _size(row)
        if left < 0:
            break
        kept.append(row)
    return kept


def columns_of(rows: Sequence[Mapping[str, Any]], declared: Mapping[str, str] | None = None) -> list[DatasetColumn]:
    """In the order of the declaration, else of first appearance."""
    names = list(declared) if declared else list(dict.fromkeys(name for row in rows for name in row))
    found: list[DatasetColumn] = []
    left = _COLUMNS_CHARS
    for name in names[:MAX_COLUMNS]:
        column = _column(name, [row.get(name) for row in rows], declared)
        left -= len(column.model_dump_json())
        if left < 0:
            break
        found.append(column)
    rest = len(names) - len(found)
    return [*found, *([DatasetColumn(name="…", type=f"[{rest} more columns]")] if rest else [])]


def _column(name: str, values: Sequence[Any], declared: Mapping[str, str] | None) -> DatasetColumn:
    lengths = [len(value) for value in values if isinstance(value, str)]
    return DatasetColumn(
        name=shown(str(name), _NAME_CHARS),
        type=shown(declared[name] if declared else type_of(values), _TYPE_CHARS),
        mean_chars=round(fmean(lengths), 1) if lengths else None,
        max_chars=max(lengths) if lengths else None,
    )


def type_of(values: Iterable[Any], depth: int = 0) -> str:
    """What all these are: ``int``, ``string | null``, ``list[float]``, ``{a: int, b: string}``."""
    kinds: dict[str, None] = {}
    items: list[Any] = []
    objects: list[Mapping[str, Any]] = []
    for value in values:
        if isinstance(value, Mapping):
            objects.append(value)
        elif isinstance(value, list | tuple):
            items.extend(value)
            kinds["list"] = None
        else:
            kinds[_scalar(value)] = None
    if "float" in kinds:
        kinds.pop("int", None)
    names = [f"list[{type_of(items, depth + 1)}]" if kind == "list" and depth < 3 else kind for kind in kinds]
    if objects:
        names.insert(0, _object_type(objects, depth))
    if "null" in names:  # last, where one expects it
        names = [name for name in names if name != "null"] + ["null"]
    return " | ".join(names) or "unknown"


def _object_type(objects: Sequence[Mapping[str, Any]], depth: int) -> str:
    names = list(dict.fromkeys(name for one in objects for name in one))
    if depth >= 3 or len(names) > _FIELDS:
        return "object"
    inner = [f"{name}: {type_of([one.get(name) for one in objects], depth + 1)}" for name in names]
    return "{" + ", ".join(inner) + "}"


def _scalar(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float"
        case str():
            return "string"
        case bytes() | bytearray() | memoryview():
            return "bytes"
    return type(value).__name__


def _shaped_row(row: Mapping[str, Any], max_chars: int, max_items: int) -> dict[str, JsonValue]:
    names = list(row)
    shaped = {
        shown(str(name), _NAME_CHARS): _shaped(row[name], max_chars, max_items, 1) for name in names[:MAX_COLUMNS]
    }
    if len(names) > MAX_COLUMNS:
        shaped["…"] = f"[{len(names) - MAX_COLUMNS} more columns]"
    return shaped


def _shaped(value: Any, max_chars: int, max_items: int, depth: int) -> JsonValue:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else shown(f"{value:.6e}" if abs(value) < 1e300 else "[a huge number]")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return shown(value, max_chars)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping | list | tuple) and depth >= _DEPTH:
        return f"[{len(value)} more within]"
    if isinstance(value, Mapping):
        kept = list(value.items())[: max(max_items, 8)]
        inner = {shown(str(k), _NAME_CHARS): _shaped(v, max_chars, max_items, depth + 1) for k, v in kept}
        return {**inner, **({"…": f"[{len(value) - len(kept)} more]"} if len(kept) < len(value) else {})}
    if isinstance(value, list | tuple):
        cut = [_shaped(item, max_chars, max_items, depth + 1) for item in value[:max_items]]
        return [*cut, f"[{len(value) - max_items} more]"] if len(value) > max_items else cut
    return shown(str(value), max_chars)  # a date, a decimal


def _size(value: JsonValue) -> int:
    return len(json.dumps(value, ensure_ascii=False))

"""Whether two items are the same, also in two processes. Invariant: equal items have the same text, whatever their type
and the order of their sets and keys."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, JsonValue


def plain(item: Any) -> str:
    """Text that is the same for equal items in every process, whatever their type."""
    return json.dumps(_plain(item), sort_keys=True)


def _plain(item: Any) -> JsonValue:
    if item is None or isinstance(item, str | int | float | bool):
        return item
    if isinstance(item, BaseModel):
        return _plain(item.model_dump())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: _plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, set | frozenset):
        texts: list[JsonValue] = [plain(one) for one in item]
        return sorted(texts, key=str)
    if isinstance(item, list | tuple):
        return [_plain(one) for one in item]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(item))

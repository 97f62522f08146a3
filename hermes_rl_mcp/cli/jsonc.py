"""JSON, with comments where they are admitted, read together with places in the text.

Invariant: setting a member changes the characters of that member and no other, so comments, order and spelling of all
that somebody else wrote survive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from pydantic import JsonValue

MAX_DEPTH = 200
_STRICT_GAP = re.compile(r"[ \t\r\n]*")
_RELAXED_GAP = re.compile(r"(?:[ \t\r\n]|//[^\n]*|/\*.*?\*/)*+", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')
_PLAIN = re.compile(r"-?[0-9][0-9eE+.\-]*|true|false|null")


class JsonProblemError(ValueError):
    """What is wrong, and where."""


@dataclass(frozen=True)
class Node:
    """One value and where it stands: ``text[start:end]``."""

    start: int
    end: int
    value: JsonValue
    members: Mapping[str, Node] = field(default_factory=dict)
    """Of an object, in order."""
    key_start: int = -1
    """Of a member: where its key begins."""


def parse(text: str, *, relaxed: bool = False) -> Node:
    """``relaxed`` admits comments and a comma after the last item. Raises JsonProblemError."""
    reader = _Reader(text, relaxed)
    node = reader.value(0)
    if reader.gap():
        reader.fail("there is more after the end of the document")
    return node


def with_member(text: str, container: str, name: str, value: JsonValue, *, relaxed: bool = False) -> str:
    """``text`` with ``root[container][name] = value``. Raises JsonProblemError if that has no place in it."""
    root = parse(text, relaxed=relaxed)
    if not isinstance(root.value, dict):
        raise JsonProblemError("the document is no object")
    unit = _inner_indent(text, root) or "  "
    holder = root.members.get(container)
    if holder is None:
        return _inserted(text, root, container, {name: value}, unit)
    if not isinstance(holder.value, dict):
        raise JsonProblemError(f'"{container}" is no object')
    old = holder.members.get(name)
    if old is None:
        return _inserted(text, holder, name, value, unit)
    return text[: old.start] + _dumped(text, value, _indent_at(text, old.key_start), unit) + text[old.end :]


class _Reader:
    """One pass over the text."""

    def __init__(self, text: str, relaxed: bool) -> None:
        self.text = text
        self.at = 0
        self._relaxed = relaxed
        self._gap = _RELAXED_GAP if relaxed else _STRICT_GAP

    def fail(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        raise JsonProblemError(f"line {line}, column {column}: {what}")

    def gap(self) -> str:
        """Skips what means nothing. Returns the next character, at the end an empty string."""
        found = self._gap.match(self.text, self.at)
        assert found is not None  # it matches nothing at all, too
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")
        first = self.gap()
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._array(depth)
        start = self.at
        value = self._scalar(_STRING if first == '"' else _PLAIN)
        return Node(start, self.at, value)

    def _object(self, depth: int) -> Node:
        start = self.at
        members: dict[str, Node] = {}
        more = self._opened("}")
        while more:
            if self.gap() != '"':
                self.fail("a name in double quotes is missing")
            key_start = self.at
            key = str(self._scalar(_STRING))
            if key in members:
                self.at = key_start
                self.fail(f"the name {json.dumps(key)} stands here twice")
            if self.gap() != ":":
                self.fail("a colon is missing")
            self.at += 1
            members[key] = replace(self.value(depth + 1), key_start=key_start)
            more = self._goes_on("}")
        return Node(start, self.at, {key: node.value for key, node in members.items()}, members)

    def _array(self, depth: int) -> Node:
        start = self.at
        items: list[JsonValue] = []
        more = self._opened("]")
        while more:
            items.append(self.value(depth + 1).value)
            more = self._goes_on("]")
        return Node(start, self.at, items)

    def _opened(self, closing: str) -> bool:
        """Behind the opening bracket: whether there is an item."""
        self.at += 1
        return not self._closed(closing)

    def _goes_on(self, closing: str) -> bool:
        """Behind an item: whether there is another one."""
        if self.gap() != ",":
            if not self._closed(closing):
                self.fail(f"a comma or {closing} is missing")
            return False
        self.at += 1
        return not (self._relaxed and self._closed(closing))

    def _closed(self, closing: str) -> bool:
        if self.gap() != closing:
            return False
        self.at += 1
        return True

    def _scalar(self, pattern: re.Pattern[str]) -> JsonValue:
        found = pattern.match(self.text, self.at)
        try:
            value: JsonValue = json.loads(found[0] if found else "")
        except ValueError:
            self.fail("no JSON value")
        assert found is not None
        self.at = found.end()
        return value


def _inserted(text: str, holder: Node, name: str, value: JsonValue, unit: str) -> str:
    """A new member at the end of ``holder``."""
    outer = _indent_at(text, holder.start)
    inner = _inner_indent(text, holder) or outer + unit
    line = _line_end(text)
    member = f"{json.dumps(name)}: {_dumped(text, value, inner, unit)}"
    if holder.members:
        last = list(holder.members.values())[-1].end
        return f"{text[:last]},{line}{inner}{member}{text[last:]}"
    inside = text[holder.start + 1 : holder.end - 1].rstrip()  # comments, or nothing
    return f"{text[: holder.start + 1]}{inside}{line}{inner}{member}{line}{outer}{text[holder.end - 1 :]}"


def _dumped(text: str, value: JsonValue, indent: str, unit: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", _line_end(text) + indent)


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _indent_at(text: str, at: int) -> str:
    """The white space that the line of ``at`` begins with."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _inner_indent(text: str, holder: Node) -> str | None:
    """What its first member is indented by; None where that does not stand on a line of its own."""
    if not holder.members:
        return None
    at = next(iter(holder.members.values())).key_start
    indent = text[text.rfind("\n", 0, at) + 1 : at]
    return indent if "\n" in text[holder.start : at] and not indent.strip(" \t") else None

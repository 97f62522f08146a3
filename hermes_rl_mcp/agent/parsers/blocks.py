"""What all tool-call parsers have in common: finding blocks in a text, and reading JSON that a model wrote.

Invariant: ``parse`` never raises, takes time about linear in the text, and a damaged block costs only itself. What
stands between think tags is no call, however much it looks like one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hermes_rl_mcp.agent.interfaces import Parsed, ToolCall, ToolSchema

THINK, THINK_END = "<think>", "</think>"
SHOWN_CHARS = 80
"""Of a damaged block, in its error."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass
class Block:
    """What one block held, and where the text goes on behind it."""

    end: int
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skip: bool = True
    """False: it was no block after all, and its text up to ``end`` is content."""


class BlockParser:
    """Looks for ``openers`` and has each block read by ``read``."""

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]]
    closers: ClassVar[tuple[str, ...]] = ()
    """What ends a block; also dropped where it stands alone."""

    def parse(self, text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
        """``tools`` say which arguments are strings, for formats that do not; without them it is told from the text."""
        types = argument_types(tools)
        marks = re.compile("|".join(re.escape(mark) for mark in (THINK, *self.openers, *self.closers)))
        position = kept = self._thought_before(text)
        parts, calls, errors = [text[:kept]], list[ToolCall](), list[str]()
        while match := marks.search(text, position):
            if match.group() == THINK:
                end = text.find(THINK_END, match.end())
                position = len(text) if end < 0 else end + len(THINK_END)
                continue
            opens = match.group() in self.openers
            block = self.read(text, match.start(), types) if opens else Block(match.end())
            position = max(block.end, match.start() + 1)
            if block.skip:
                parts.append(text[kept : match.start()])
                kept = position
            calls += block.calls
            errors += block.errors
        parts.append(text[kept:])
        content = "".join(parts).strip() if calls or errors else text.strip()
        return Parsed(content or None, calls, errors)

    def read(self, text: str, start: int, types: Mapping[str, Mapping[str, str]]) -> Block:
        """The block whose opener stands at ``start``."""
        raise AssertionError(f"{type(self).__name__} reads no blocks")  # pragma: no cover

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as a model of this family writes them."""
        raise AssertionError(f"{type(self).__name__} writes no blocks")  # pragma: no cover

    def _thought_before(self, text: str) -> int:
        """End of a thought whose opening tag the chat template wrote; 0 where there is none. An end tag within a block
        is part of an argument."""
        end = text.find(THINK_END)
        if end < 0 or THINK in text[:end]:
            return 0
        before = text[:end]
        opened = max((before.rfind(mark) for mark in self.openers), default=-1)
        closed = max((before.rfind(mark) for mark in self.closers), default=-1)
        return 0 if opened > closed else end + len(THINK_END)

    def damaged(self, text: str, start: int, why: str) -> Block:
        """The block goes to its closer, the next opener or the end, whichever is first."""
        openers = [text.find(mark, start + 1) for mark in self.openers]
        closers = [found + len(mark) for mark in self.closers if (found := text.find(mark, start + 1)) >= 0]
        ends = [*closers, *(found for found in openers if found >= 0)]
        end = min(ends, default=len(text))
        return Block(end, errors=[f"{self.name}: {why}, found {short(text[start:end])}"])


def short(text: str) -> str:
    shown = " ".join(text[: SHOWN_CHARS + 1].split())
    return repr(shown if len(text) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}...")


def skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def read_name(text: str, position: int) -> str:
    """A tool's name at ``position``; empty if there is none."""
    match = _NAME.match(text, position)
    return match.group() if match else ""


def read_json(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at ``position`` and where it ends; line breaks within strings are let pass. Raises ValueError."""
    decoder = json.JSONDecoder(strict=False, parse_constant=_refuse)
    try:
        value, end = decoder.raw_decode(text, skip_space(text, position))
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    return value, end


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def json_text(value: Any) -> str:
    """As text that can be encoded and read again. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    return text


def arguments_text(value: Any) -> str:
    """Arguments as JSON text; what is JSON of an object already is not encoded a second time. Raises ValueError."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            inner, end = read_json(value, 0)
        except ValueError:
            return value  # whoever runs the call says that it is no JSON
        return value if isinstance(inner, dict) and not value[end:].strip() else json_text(value)
    return json_text(value)


def call_of(value: Any) -> ToolCall:
    """``{"name", "arguments" | "parameters"}``. Raises ValueError saying what is wrong."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError("no name")
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return ToolCall(new_id(), name.strip(), arguments_text(arguments))


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def argument_types(tools: Sequence[ToolSchema]) -> dict[str, dict[str, str]]:
    """Tool to argument to its JSON type, where the schema names one."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[str(function.get("name"))] = {
            key: one["type"] for key, one in properties.items() if isinstance(one, dict) and "type" in one
        }
    return found


def value_of(text: str, kind: Any) -> Any:
    """An argument that was written without quotes. ``kind`` is its JSON type, None if not known."""
    if kind == "string":
        return text
    word = text.strip()
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    try:
        value, end = read_json(word, 0)
        rewritten = json_text(value)
    except ValueError:
        return text
    if word[end:].strip():
        return text
    # Without a schema only what can be written back as it was: 1e3 and 007 stay the text they are.
    return value if kind is not None or rewritten == word or isinstance(value, dict | list) else text


def plain_text(value: Any) -> str:
    """The inverse of ``value_of``."""
    return value if isinstance(value, str) else json_text(value)


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Of a call to be written: empty if its arguments are no object."""
    try:
        value, _ = read_json(call.arguments, 0)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

"""A member of a YAML file set in its place in the text.

Invariant: nothing else in the file changes, comments included; and the result has been read back to prove it. What
cannot be done so is refused.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import yaml
from pydantic import JsonValue


class YamlProblemError(ValueError):
    """What is wrong, and where."""


def load(text: str) -> dict[str, Any]:
    """The document as data; an empty one is an empty mapping. Raises YamlProblemError."""
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise YamlProblemError(_said(error)) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise YamlProblemError("the document is no mapping")
    return loaded


def with_member(text: str, container: str, name: str, value: JsonValue) -> str:
    """``text`` with ``root[container][name] = value``. Raises YamlProblemError if that has no place in it."""
    wanted = deepcopy(load(text))
    holder = wanted.setdefault(container, {})
    if holder is None:
        holder = wanted[container] = {}
    if not isinstance(holder, dict):
        raise YamlProblemError(f"{container} is no mapping")
    holder[name] = value
    try:
        made = _placed(text, container, name, value)
        good = load(made) == wanted
    except (yaml.YAMLError, YamlProblemError):
        good = False
    if not good:
        raise YamlProblemError(f"{container} is written in a way that cannot be added to without changing the rest")
    return made


def _placed(text: str, container: str, name: str, value: JsonValue) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    line = "\r\n" if "\r\n" in text else "\n"
    if root is None:
        return _ended(text, line) + _block({container: {name: value}}, "", line)
    if not isinstance(root, yaml.MappingNode):
        raise YamlProblemError("the document is no mapping")
    pair = _pair(root, container)
    if pair is None:
        if root.flow_style:
            return _in_flow(text, root, container, {name: value})
        return _ended(text, line) + _block({container: {name: value}}, " " * root.start_mark.column, line)
    key, holder = pair
    if not isinstance(holder, yaml.MappingNode) or not holder.value:  # null, or {}
        indent = " " * (key.start_mark.column + 2)
        made = _block({name: value}, indent, line).rstrip()
        return f"{text[: key.end_mark.index]}:{line}{made}{text[holder.end_mark.index :]}"
    found = _pair(holder, name)
    if found is not None:
        return _replaced(text, found, value, flow=bool(holder.flow_style), line=line)
    if holder.flow_style:
        return _in_flow(text, holder, name, value)
    first = holder.value[0][0].start_mark
    indent = " " * first.column
    return f"{text[: first.index]}{_block({name: value}, indent, line).lstrip()}{indent}{text[first.index :]}"


def _replaced(text: str, pair: tuple[yaml.Node, yaml.Node], value: JsonValue, *, flow: bool, line: str) -> str:
    key, old = pair
    before, after = text[: key.end_mark.index], text[_last_end(old) :]
    if flow:
        return f"{before}: {json.dumps(value, ensure_ascii=False)}{after}"
    indent = " " * (key.start_mark.column + 2)
    return f"{before}:{line}{_block(value, indent, line).rstrip()}{after}"


def _in_flow(text: str, holder: yaml.MappingNode, name: str, value: JsonValue) -> str:
    at = holder.start_mark.index + 1
    member = f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
    return f"{text[:at]}{member}{', ' if holder.value else ''}{text[at:]}"


def _pair(mapping: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    return next(((key, value) for key, value in mapping.value if key.value == name), None)


def _last_end(node: yaml.Node) -> int:
    """Where its last character is; a block's own mark also covers the comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _block(value: JsonValue, indent: str, line: str) -> str:
    dumped: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=4096)
    return "".join(f"{indent}{one}{line}" for one in dumped.splitlines())


def _ended(text: str, line: str) -> str:
    return text if not text or text.endswith("\n") else text + line


def _said(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark is not None else str(problem)

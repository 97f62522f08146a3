"""Schemas of the tools as they are published: every conversation pays for them, so they say what counts and no more.

A published schema admits everything that the tool's own model gives or takes; it may only be wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DESCRIBED = ("environments", "configurable_fields", "history", "runs")
"""Parts of an answer whose own fields are published; of the others it is said that they are objects."""
_MANY = 5
"""Values of an enumeration that are not worth their room."""
_REQUIRED = 4
"""Fields whose presence tells a result from an error; a model's others are always there, too."""
_KEPT = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "maxItems", "description", "default")


def published_input(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with type, limits, default and meaning. One that may be null is described as one that may be left out:
    several clients take no unions, and a null is still understood."""
    found: dict[str, Any] = {"type": "object", "properties": {}}
    for name, part in schema.get("properties", {}).items():
        found["properties"][name] = _argument(part)
    if required := schema.get("required"):
        found["required"] = required
    return found


def _argument(part: Mapping[str, Any]) -> dict[str, Any]:
    branches = [one for one in part.get("anyOf", ()) if one.get("type") != "null"]
    whole = {**(branches[0] if branches else {}), **part}
    found = {key: whole[key] for key in _KEPT if key in whole}
    if found.get("default", 0) in (None, "", []):
        del found["default"]  # left out means nothing, as everywhere
    if "items" in whole:
        found["items"] = {key: value for key, value in whole["items"].items() if key in _KEPT}
    return found


def published_output(schema: Mapping[str, Any], error: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a result with their types, and the payload of an error besides: some clients check structured content
    against it even then."""
    models = schema.get("$defs", {})
    fields = {name: _field(name, part, models) for name, part in schema["properties"].items()}
    return {
        "type": "object",
        "properties": {"error": {"type": "string"}, **fields},
        "anyOf": [{"required": schema.get("required", [])[:_REQUIRED]}, {"required": error["required"]}],
    }


def _field(name: str, node: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    """``models`` empty: what lies in it is only said to be an object."""
    if "anyOf" in node:
        return _either([_field(name, one, models) for one in node["anyOf"]])
    if "$ref" in node:
        model = models.get(node["$ref"].rsplit("/", 1)[1], {})
        if name in _DESCRIBED and "properties" in model:
            return {
                "type": "object",
                "properties": {n: _field("", part, {}) for n, part in model["properties"].items()},
            }
        return _flat(model) if model else {}
    if node.get("type") == "array":
        items = _field(name, node.get("items", {}), models)
        return {"type": "array", "items": items} if items and name in _DESCRIBED else {"type": "array"}
    return _flat(node)


def _flat(node: Mapping[str, Any]) -> dict[str, Any]:
    if "enum" in node and len(node["enum"]) < _MANY:
        return {"enum": node["enum"]}
    return {"type": node["type"]} if "type" in node else {}


def _either(branches: list[dict[str, Any]]) -> dict[str, Any]:
    """One of a kind, or null; anything where there are more kinds."""
    rest = [one for one in branches if one.get("type") != "null"]
    if len(rest) != 1 or len(branches) != 2 or "type" not in rest[0]:
        return {}
    return {**rest[0], "type": [rest[0]["type"], "null"]}

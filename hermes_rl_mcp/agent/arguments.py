"""A call's arguments, brought to the types of the tool's schema where that is unambiguous, then checked against it.

Invariant: what is returned is valid against the schema; what a model wrote is changed in type only, never in meaning.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hermes_rl_mcp.errors import InvalidValueError

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}(?:\.0+)?")
_SHOWN_CHARS = 80


def prepared(name: str, parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that fit ``parameters`` (a JSON schema of an object). Raises InvalidValueError, in words for a model.

    "42" becomes 42 where a whole number is wanted, and so on; null for an optional argument means that it is not given.
    """
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = set(parameters.get("required") or ())
    unknown = sorted(set(arguments) - set(properties))
    if unknown and not parameters.get("additionalProperties") and "patternProperties" not in parameters:
        raise InvalidValueError(
            f"{name} has no argument {', '.join(map(repr, unknown))[:_SHOWN_CHARS]}.",
            hint=f"It takes: {', '.join(properties) or 'nothing'}.",
        )
    values = {key: coerced(properties.get(key) or {}, value) for key, value in arguments.items()}
    values = {
        key: value
        for key, value in values.items()
        if value is not None or key in required or key not in properties or _fits(None, properties[key])
    }
    _check(name, parameters, values)
    return values


def coerced(schema: Any, value: Any) -> Any:
    """``value`` in the type that ``schema`` asks for, if there is one plain way to read it so; else ``value``."""
    if not isinstance(schema, Mapping):
        return value
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list):
        if any(_fits(value, choice) for choice in choices):
            return value
        changed = ((choice, coerced(choice, value)) for choice in choices)
        return next((one for choice, one in changed if _fits(one, choice)), value)
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if kinds and not any(_is(value, kind) for kind in kinds):
        for kind in kinds:
            changed_value = _as(kind, value, schema)
            if _is(changed_value, kind):
                value = changed_value
                break
    if isinstance(value, list):
        return [coerced(schema.get("items"), item) for item in value]
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        return {key: coerced(properties.get(key), item) for key, item in value.items()}
    return value


def _as(kind: str, value: Any, schema: Mapping[str, Any]) -> Any:
    match kind:
        case "integer":
            return _integer(value)
        case "number":
            return _number(value)
        case "boolean" if isinstance(value, str):
            return {"true": True, "false": False}.get(value.strip().lower(), value)
        case "array":
            found = _json(value)
            one_string = isinstance(value, str) and (schema.get("items") or {}).get("type") == "string"
            return found if isinstance(found, list) or not one_string else [value]
        case "object":
            return _json(value)
        case "null" if isinstance(value, str) and value.strip().lower() in ("", "null", "none"):
            return None
        case "string" if isinstance(value, bool | int | float | list | dict):
            return json.dumps(value, ensure_ascii=False)
    return value


def _integer(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    return value


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return value
    return int(number) if _WHOLE.fullmatch(value.strip()) and "." not in value else number


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
    return True


def _fits(value: Any, schema: Any) -> bool:
    import jsonschema  # 60 ms, and not every process calls tools

    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except (jsonschema.exceptions.SchemaError, jsonschema.exceptions.UnknownType, TypeError):
        return True


def _check(name: str, parameters: Mapping[str, Any], values: dict[str, Any]) -> None:
    import jsonschema

    try:
        found = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(parameters).iter_errors(values))
    except (jsonschema.exceptions.SchemaError, jsonschema.exceptions.UnknownType, TypeError):
        return  # a server's broken schema: the server itself looks at what it gets
    if found is None:
        return
    where = ".".join(str(part) for part in found.absolute_path)
    text = found.message if len(found.message) <= 300 else f"{found.message[:300]}..."
    raise InvalidValueError(
        f"{name}: {f'argument {where}: ' if where else ''}{text}.",
        hint=f"Its arguments: {_summary(parameters)}.",
    )


def _summary(parameters: Mapping[str, Any]) -> str:
    required = set(parameters.get("required") or ())
    named = (parameters.get("properties") or {}).items()
    return (
        ", ".join(f"{key} ({_kind(schema)}{', required' if key in required else ''})" for key, schema in named)
        or "none"
    )


def _kind(schema: Any) -> str:
    if isinstance(schema, Mapping):
        if "enum" in schema:
            return " | ".join(str(one) for one in schema["enum"])
        kind = schema.get("type", "any")
        return kind if isinstance(kind, str) else " or ".join(kind)
    return "any"

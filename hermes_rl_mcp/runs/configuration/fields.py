"""Pydantic classes as fields that a person or an agent can read and set."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from hermes_rl_mcp.contracts.environments import FieldInfo, Section
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.syntax import parse


@cache
def model_fields(model: type[BaseModel], section: Section) -> tuple[FieldInfo, ...]:
    """A pydantic class as fields for people. Nobody changes them: they are those of every caller."""
    schema = model.model_json_schema()
    texts = _docstrings(model)
    fields = []
    for name, info in model.model_fields.items():
        properties = schema["properties"][name]
        default = info.get_default(call_default_factory=True) if not info.is_required() else None
        fields.append(
            FieldInfo(
                name=name,
                type=readable_type(properties),
                default=default,
                description=" ".join((info.description or texts.get(name, "")).split()),
                section=section,
                json_schema=properties,
            )
        )
    return tuple(fields)


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field name to the text below it. Read when it is asked for: at import it would slow the start of every server."""
    [body] = [node.body for node in parse(dedent(getsource(model))).body if isinstance(node, ast.ClassDef)]
    found = {}
    for field, text in pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = cleandoc(words)
    return found


def readable_type(schema: Mapping[str, Any]) -> str:
    """``int``, ``float | None``, ``'a' | 'b'`` out of a JSON schema."""
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " | ".join(repr(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(readable_type(part) for part in schema[key]))
    names = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}
    kind = schema.get("type")
    if kind == "array":
        return f"list[{readable_type(schema.get('items') or {})}]"
    if kind == "object":
        return "dict"
    return names.get(str(kind), "any")


def coerce_library_value(model: type[BaseModel], name: str, value: JsonValue) -> JsonValue:
    """Validate one field of TrainerConfig or ServerEntry as pydantic would ("8" becomes 8). InvalidValueError."""
    info = model.model_fields[name]
    annotation: Any = info.annotation
    for constraint in info.metadata:
        annotation = Annotated[annotation, constraint]
    try:
        coerced = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise invalid(name, value, sentence(error)) from error
    if isinstance(value, bool) and isinstance(coerced, int | float) and not isinstance(coerced, bool):
        raise invalid(name, value, "must be a number")  # pydantic takes true for 1, which nobody can mean
    if isinstance(coerced, float) and not math.isfinite(coerced):
        raise invalid(name, value, "must be a finite number")
    result: JsonValue = TypeAdapter(annotation).dump_python(coerced, mode="json")
    return result


def invalid(name: str, value: JsonValue, reason: str) -> InvalidValueError:
    """The error of a value that its field does not take."""
    return InvalidValueError(
        f"Field '{name}' does not take {value!r}: {reason.rstrip('.')}.",
        hint="Call rl_get_current_config to see its type and meaning.",
        details={"field": name},
    )


def sentence(error: ValidationError) -> str:
    """Pydantic's verdict in one line."""
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        place = ".".join(str(part) for part in item["loc"] if isinstance(part, str))
        message = item["msg"].removeprefix("Value error, ")  # of a validator of ours or of the environment
        message = message[:1].lower() + message[1:]
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(dict.fromkeys(parts))


def is_int(value: JsonValue) -> bool:
    """A whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_int(value: JsonValue) -> int:
    """For a value that ``is_int`` accepted."""
    if not isinstance(value, int):
        raise TypeError(f"not a whole number: {value!r}")
    return value

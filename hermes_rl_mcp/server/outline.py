"""The outline of a result's JSON schema, read off its class: what the published schemas are made of.

Pydantic's own schemas of the ten results take a tenth of the server's start. Invariant: where this module does not
understand a class, pydantic is asked, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from inspect import signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue

_TYPES: dict[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null", datetime: "string"},
    **{list: "array", tuple: "array", Sequence: "array", dict: "object", Mapping: "object"},
}


class _NotUnderstood(Exception):
    """An annotation that has no rule here."""


def result_of(tool: Callable[..., Any]) -> type[BaseModel]:
    """The class of a tool's results: it returns ``Annotated[CallToolResult, Class]``."""
    annotation = signature(tool).return_annotation
    found = annotation.__metadata__[0]
    assert isinstance(found, type) and issubclass(found, BaseModel), annotation
    return found


def outline(model: type[BaseModel]) -> dict[str, Any]:
    """Properties, required names and ``$defs`` as a JSON schema has them, without texts, limits and defaults."""
    models: dict[str, Any] = {}
    try:
        return {**_model(model, models), "$defs": models}
    except _NotUnderstood:
        return model.model_json_schema()


def _model(model: type[BaseModel], models: dict[str, Any]) -> dict[str, Any]:
    fields = model.model_fields
    return {
        "type": "object",
        "properties": {info.alias or name: _part(info.annotation, models) for name, info in fields.items()},
        "required": [info.alias or name for name, info in fields.items() if info.is_required()],
    }


def _part(annotation: Any, models: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (Any, JsonValue):
        return {}
    if origin is Annotated:
        return _part(arguments[0], models)
    if origin in (Union, UnionType):
        return {"anyOf": [_part(one, models) for one in arguments]}
    if origin is Literal:
        return _choice(arguments)
    if (named := _TYPES.get(origin or annotation)) is not None:
        return {"type": named, **({"items": _part(arguments[0], models)} if named == "array" and arguments else {})}
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel | Enum):
        raise _NotUnderstood
    if annotation.__name__ not in models:
        models[annotation.__name__] = {}  # one that holds itself ends here
        found = _model(annotation, models) if issubclass(annotation, BaseModel) else _choice(list(annotation))
        models[annotation.__name__].update(found)
    return {"$ref": f"#/$defs/{annotation.__name__}"}


def _choice(values: Sequence[Any]) -> dict[str, Any]:
    plain = [one.value if isinstance(one, Enum) else one for one in values]
    kinds = {_TYPES.get(type(one)) for one in plain}
    named = {"type": kinds.pop()} if len(kinds) == 1 else {}
    return {**named, **({"const": plain[0]} if len(plain) == 1 else {"enum": plain})}

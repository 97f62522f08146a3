"""What an environment can be told, as data: for the catalog, which never imports an environment itself."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import to_jsonable_python

from hermes_rl_mcp.contracts.environments import EnvironmentSchema, FieldInfo, ValidationReply
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.hook_rules import place
from hermes_rl_mcp.envs.loading import defaults_of
from hermes_rl_mcp.envs.places import place_of_field
from hermes_rl_mcp.errors import EnvironmentFileError


def describe(environment: type[BaseEnv]) -> EnvironmentSchema:
    """Fields of the config class that ``config_init`` uses, with that instance's values as defaults."""
    config, servers = defaults_of(environment)
    schema = _schema(environment, type(config))
    prompt, answer = environment.typical_tokens or (None, None)
    return EnvironmentSchema(
        name=environment.env_name(),
        class_name=environment.__name__,
        config_class=type(config).__name__,
        fields=[_field(config, name, schema) for name in type(config).model_fields],
        server=to_jsonable_python(servers[0].model_dump()) if servers else {},
        trainer_defaults=dict(environment.trainer_defaults),
        typical_prompt_tokens=prompt,
        typical_answer_tokens=answer,
    )


def validate(environment: type[BaseEnv], values: Mapping[str, JsonValue]) -> ValidationReply:
    """Each value judged by the config class beside the defaults of ``config_init``."""
    default, _ = defaults_of(environment)
    model = type(default)
    errors = {name: "No such field." for name in values if name not in model.model_fields}
    good = {name: value for name, value in values.items() if name not in errors}
    base = {name: getattr(default, name) for name in model.model_fields}
    while True:
        try:
            config = model.model_validate({**base, **good})
        except ValidationError as error:
            found = dict(_judged(dict(one)) for one in error.errors())
            errors.update({name or "values": text for name, text in found.items()})
            bad = set(found) & set(good)
            if not bad:  # the values do not fit each other, or the defaults themselves are wrong
                return ValidationReply(ok=False, errors=errors)
            good = {name: value for name, value in good.items() if name not in bad}
        else:
            coerced = {name: to_jsonable_python(getattr(config, name)) for name in good}
            for name in [name for name in good if _switch_as_number(values[name], coerced[name])]:
                errors[name] = f"Input should be a number, found {values[name]!r}"
                del coerced[name]
            return ValidationReply(ok=not errors, values=coerced, errors=errors)


def _judged(error: dict[str, Any]) -> tuple[str, str]:
    """Field and sentence. An error of the model as a whole has no field, and its input is the whole configuration."""
    if not error["loc"]:
        return "", str(error["msg"])
    return str(error["loc"][0]), f"{error['msg']}, found {error['input']!r}"


def _schema(environment: type[BaseEnv], model: type[BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema()
    except PydanticInvalidForJsonSchema as error:
        file = str(getattr(sys.modules.get(model.__module__), "__file__", None) or "")
        bad = [name for name, info in model.model_fields.items() if not _has_schema(info.annotation)]
        declared = place_of_field(Path(file), bad[0]) if bad and file else ""
        raise EnvironmentFileError(
            f"{place(environment)}: {model.__name__}.{bad[0] if bad else '?'} is of a type that cannot be told as data"
            f"{f' ({declared})' if declared else ''}.",
            hint="A field is a number, a text, true or false, a list or a mapping of these; functions belong into the "
            "environment's class.",
        ) from error


def _has_schema(annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).json_schema()
    except PydanticInvalidForJsonSchema:
        return False
    return True


def _switch_as_number(given: object, taken: object) -> bool:
    """Pydantic takes true for 1, which nobody who says it of a number can mean."""
    return isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool)


def _field(config: BaseModel, name: str, schema: Mapping[str, Any]) -> FieldInfo:
    info = type(config).model_fields[name]
    return FieldInfo(
        name=name,
        type=type_name(info.annotation),
        default=to_jsonable_python(getattr(config, name), fallback=str, inf_nan_mode="null"),
        description=info.description or "",
        json_schema=_inlined(schema["properties"].get(info.alias or name, {}), schema.get("$defs", {})),
    )


def type_name(annotation: Any) -> str:
    """``int``, ``float | None``, ``'a' | 'b'``, ``list[str]``; an enum by its values."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(part) for part in arguments)
    if origin is typing.Literal:
        return " | ".join(repr(value) for value in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(repr(member.value) for member in annotation)
    if origin is not None:
        inner = ", ".join("..." if part is Ellipsis else type_name(part) for part in arguments)
        return f"{getattr(origin, '__name__', str(origin))}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def _inlined(part: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """A schema without ``$ref``. A model that contains itself is cut off after a few levels."""
    if isinstance(part, list):
        return [_inlined(one, definitions, depth) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        if depth > 4:
            return {"type": "object"}
        target = definitions.get(part["$ref"].rsplit("/", 1)[-1], {})
        rest = {key: value for key, value in part.items() if key != "$ref"}
        return _inlined({**target, **rest}, definitions, depth + 1)
    return {key: _inlined(value, definitions, depth) for key, value in part.items()}

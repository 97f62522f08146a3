"""Short ways to write the JSON schemas of arguments."""

from __future__ import annotations

from typing import Any


def arguments(required: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    """A schema of an object."""
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **more}


def whole(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "integer", "description": description, **more}


def number(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "number", "description": description, **more}


def flag(description: str, default: bool = False) -> dict[str, Any]:
    return {"type": "boolean", "description": description, "default": default}


def choice(description: str, *options: str, default: str | None = None) -> dict[str, Any]:
    more = {} if default is None else {"default": default}
    return {"type": "string", "enum": list(options), "description": description, **more}


def texts(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description, **more}

"""Where in a user's file something is: of an exception, a hook, a config field. As ``FILE:LINE``, or empty."""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.syntax import parse


def place_of_error(error: BaseException, file: str) -> str:
    """The deepest line of ``file`` that the exception, or what caused it, went through."""
    seen: set[int] = set()
    found = ""
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, SyntaxError) and cause.filename == file and cause.lineno:
            return f"{file}:{cause.lineno}"
        for frame in traceback.extract_tb(cause.__traceback__):
            if frame.filename == file and frame.lineno:
                found = f"{file}:{frame.lineno}"
        cause = cause.__cause__ or cause.__context__
    return found


def place_of_hook(owner: type[Any], name: str) -> str:
    """Where the method is defined; the class itself if it does not define it."""
    method = inspect.unwrap(getattr(owner, name, owner))
    code = getattr(method, "__code__", None)
    if code is not None and not code.co_filename.startswith(str(Path(__file__).parent)):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return place_of_class(owner)


def place_of_code(function: object) -> str:
    """Where a function is defined; empty for what is none."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def place_of_class(owner: type[Any]) -> str:
    """Where the class statement is."""
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    if not file:
        return ""
    return _first(Path(file), lambda node: isinstance(node, ast.ClassDef) and node.name == owner.__name__) or file


def place_of_field(file: Path, field: str) -> str:
    """Where a config field is declared, or else where it is given a value by its name; empty if ``file`` has neither.

    Reads source text; nothing is imported.
    """

    def declares(node: ast.AST) -> bool:
        return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field

    return _first(file, declares) or _first(file, lambda node: isinstance(node, ast.keyword) and node.arg == field)


def _first(file: Path, wanted: Any) -> str:
    try:
        tree = parse(read_file(file))
    except (OSError, SyntaxError, ValueError):
        return ""
    lines = [node.lineno for node in ast.walk(tree) if wanted(node) and hasattr(node, "lineno")]
    return f"{file}:{min(lines)}" if lines else ""

"""Every error that a tool, a resource or the start of the server can end with says what to do next."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from hermes_rl_mcp import errors
from hermes_rl_mcp.paths import install_root

FOLDERS = ("operations", "runs", "catalog", "server")
TAKE_HINTS = {
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.HermesRLError) and "hint" in inspect.signature(kind).parameters
}
"""The others have one of their own."""


def without_hint(tree: ast.Module) -> Iterator[int]:
    """Lines where an error is made and told no hint; classes of the module's own are looked at, too."""
    own = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in TAKE_HINTS for base in node.bases)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in TAKE_HINTS | own:
                if not {"hint", None} & {keyword.arg for keyword in keywords}:
                    yield node.lineno


def test_no_error_is_without_a_next_step() -> None:
    root = install_root() / "hermes_rl_mcp"
    found = {
        f"{path.relative_to(root)}:{line}"
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        for line in without_hint(ast.parse(path.read_text()))
    }
    assert not found


def test_the_search_finds_an_error_without_a_next_step() -> None:
    text = "class Odd(NotFoundError):\n    pass\nOdd('x')\nNotFoundError(hint='y')\nInvalidValueError('x')\nprint()\n"
    assert list(without_hint(ast.parse(text))) == [3, 5]
    assert {"HermesRLError", "PreflightError", "EndpointError"} <= TAKE_HINTS

"""What a file written for Atropos expects of the process that imports it: its folder, its import paths, the mends."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from hermes_rl_mcp.envs.community.mends import mend
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.syntax import parse


def community_source(path: Path) -> ast.Module | None:
    """The parsed file if it, or a sibling that it imports, may need atroposlib; None for every other file."""
    try:
        text = read_file(path)
        return parse(text) if b"atroposlib" in text else None
    except (OSError, SyntaxError, ValueError):
        return None  # importing it says what is wrong


def prepare(path: Path, tree: ast.Module) -> str:
    """Mends what is broken and makes the file's imports work. Returns the module name under which to import it."""
    mend()
    folder = working_folder(path)
    for entry in (folder, path.parent):
        if str(entry) not in sys.path:
            sys.path.append(str(entry))
    level = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    if not level or level > len(path.parents) - 1:
        return path.stem
    root = path.parents[level]  # relative imports: the module needs its packages' names
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return ".".join(path.relative_to(root).with_suffix("").parts)


def working_folder(file: Path) -> Path:
    """Where Atropos' environments are started from: the folder above ``environments``, else that of the file."""
    for parent in file.absolute().parents:
        if parent.name == "environments":
            return parent.parent
    return file.absolute().parent

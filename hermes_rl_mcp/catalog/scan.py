"""Finds environment classes by reading source text. Nothing is imported or executed, whatever a file contains.

A class counts when a chain of bases, within one scanned folder, ends in a class called ``BaseEnv``. A class that is
only a base (it has no ``name`` of its own and another class found derives from it) is left out.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hermes_rl_mcp.contracts.environments import EnvironmentInfo, ScanProblem, ScanResult
from hermes_rl_mcp.errors import UnknownEnvironmentError
from hermes_rl_mcp.files import NotAFileError, read_file
from hermes_rl_mcp.syntax import parse

MAX_FILE_BYTES = 1_000_000
"""Larger files are reported, not parsed: an environment is a few hundred lines."""
MAX_FILES = 2_000
"""Per folder; a scan of somebody's whole home directory must end."""
_ROOT_CLASS = "BaseEnv"
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}

Source = Literal["bundled", "user"]
Base = Literal["hermes_rl_mcp", "atroposlib"]


@dataclass(frozen=True)
class _Class:
    """What matters of one class statement; bases are resolved to (module, class name) through the file's imports."""

    file: Path
    module: str
    name: str
    bases: tuple[tuple[str, str], ...]
    own_name: str | None
    """Its attribute ``name``."""
    doc: str
    """Its own docstring, else that of its module."""


def scan(bundled: Path | None, user_dirs: Sequence[Path]) -> ScanResult:
    """All environments of the folders. A user's environment wins over a bundled one of the same name. Of several with
    one name the first keeps it, the others go by their file's name; every clash is reported as a problem."""
    environments: list[EnvironmentInfo] = []
    problems: list[ScanProblem] = []
    roots: list[tuple[Path, Source]] = [(folder, "user") for folder in user_dirs]
    if bundled is not None:
        roots.append((bundled, "bundled"))
    seen: dict[str, EnvironmentInfo] = {}
    for root, source in roots:
        if not root.is_dir():
            problems.append(ScanProblem(file_path=str(root), reason="not a folder; check --env-dir"))
            continue
        for info in _scan_folder(root, source, problems):
            if first := seen.get(info.name):
                other = _other_name(info, seen)
                instead = f"listed as '{other}'" if other else "hidden"
                reason = f"environment name '{info.name}' is already taken by {first.file_path}; this one is {instead}"
                problems.append(ScanProblem(file_path=info.file_path, reason=reason))
                if other is None:
                    continue
                info = info.model_copy(update={"name": other})
            seen[info.name] = info
            environments.append(info)
    environments.sort(key=lambda info: info.name)
    return ScanResult(environments=environments, problems=problems)


def _other_name(info: EnvironmentInfo, seen: Mapping[str, EnvironmentInfo]) -> str | None:
    """For an environment whose name is taken: its file's, else its path's; in the same file the class tells them apart.
    None for a bundled one that a user's file of the same name replaces."""
    taken = {*seen, *(one.stem for one in seen.values())}
    if any(one.file_path == info.file_path for one in seen.values()):
        return f"{info.stem}.{info.class_name}"
    if info.stem not in taken:
        return info.stem
    if info.source == "bundled":
        return None
    path = Path(info.file_path).with_suffix("")
    for parts in range(2, len(path.parts)):
        if (dotted := ".".join(path.parts[-parts:])) not in taken:
            return dotted
    return None


def find(environments: Iterable[EnvironmentInfo], name: str) -> EnvironmentInfo:
    """By name, else by file stem. Raises UnknownEnvironmentError with what there is."""
    known = list(environments)
    for info in known:
        if info.name == name:
            return info
    by_stem = [info for info in known if info.stem == name]
    if by_stem:
        return by_stem[0]
    raise UnknownEnvironmentError(name, [info.name for info in known])


def _scan_folder(root: Path, source: Source, problems: list[ScanProblem]) -> list[EnvironmentInfo]:
    classes: dict[tuple[str, str], _Class] = {}
    for file in python_files(root, problems):
        try:
            found = _classes_of(file, root)
        except _Unreadable as error:
            problems.append(ScanProblem(file_path=str(file), reason=str(error)))
            continue
        for item in found:
            classes[(item.module, item.name)] = item
    modules = {item.module for item in classes.values()}
    environments: dict[tuple[str, str], Base] = {}
    parents: set[tuple[str, str]] = set()
    for key, item in classes.items():
        base = _environment_base(item, classes, modules, frozenset())
        if base is not None and item.name != _ROOT_CLASS:
            environments[key] = base
    for key in environments:
        parents.update(parent for parent in _parents(classes[key], classes, modules) if parent in environments)
    infos = []
    for key, base in environments.items():
        item = classes[key]
        if item.own_name is None and key in parents:
            continue  # only a base for others
        infos.append(_info(item, base, source))
    return infos


def python_files(root: Path, problems: list[ScanProblem] | None = None) -> Iterator[Path]:
    """Files of a folder that may hold environments, in the order of their paths; others go to ``problems``."""
    problems = [] if problems is None else problems
    count = 0
    inside = root.resolve()
    for folder, names, files in os.walk(root, followlinks=False):
        names[:] = sorted(n for n in names if not n.startswith(("_", ".")) and n not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith(("_", ".")):
                continue
            path = Path(folder) / name
            if not _is_text(str(path)):
                shown = os.fsencode(path).decode(errors="backslashreplace")
                problems.append(ScanProblem(file_path=shown, reason="its path is not valid UTF-8; rename it"))
                continue
            # realpath, because Path.resolve() raises for a link that leads to itself
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                reason = "a link that leads out of the folder; not followed"
                problems.append(ScanProblem(file_path=str(path), reason=reason))
                continue
            count += 1
            if count > MAX_FILES:
                reason = f"more than {MAX_FILES} Python files; the rest was not read. Choose a smaller folder"
                problems.append(ScanProblem(file_path=str(root), reason=reason))
                return
            yield path


class _Unreadable(Exception):
    """Why one file was not read."""


def _classes_of(file: Path, root: Path) -> tuple[_Class, ...]:
    try:
        if not file.is_file():
            raise _Unreadable("not a regular file")
        state = file.stat()
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror or error}") from error
    return _classes_in(file, root, (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))


@lru_cache(maxsize=MAX_FILES)
def _classes_in(file: Path, root: Path, state: tuple[int, ...]) -> tuple[_Class, ...]:
    """Parsing takes a hundred times as long as asking whether a file has changed (``state``), and lists are asked for
    often."""
    try:
        source = read_file(file, MAX_FILE_BYTES, inside=root)
    except NotAFileError as error:
        raise _Unreadable(error.reason) from error
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror or error}") from error
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    try:
        tree = parse(source)
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno else ""
        raise _Unreadable(f"not valid Python: {error.msg}{place}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise _Unreadable(f"not valid Python: {str(error) or type(error).__name__}") from error
    imported = _imports(tree, module)
    module_doc = ast.get_docstring(tree) or ""
    return tuple(
        _Class(
            file=file,
            module=module,
            name=node.name,
            bases=tuple(_base_names(node, module, imported)),
            own_name=_name_attribute(node),
            doc=ast.get_docstring(node) or module_doc,
        )
        for node in _walk_classes(tree)
        if not node.name.startswith("_")
    )


def _walk_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Class statements at the top of the module, also under ``if`` and ``try``: what an importer can name."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.ClassDef):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))
            if isinstance(node, ast.Try):
                pending.extend(statement for handler in node.handlers for statement in handler.body)


def _imports(tree: ast.Module, module: str) -> dict[str, tuple[str, str | None]]:
    """Local name to (module, attribute); attribute None for a module import."""
    package = module.split(".")[:-1]
    names: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or target] = (target, None)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                prefix = package[: len(package) - node.level + 1]
                origin = ".".join([*prefix, *([origin] if origin else [])])
            for alias in node.names:
                names[alias.asname or alias.name] = (origin, alias.name)
    return names


def _base_names(
    node: ast.ClassDef, module: str, imported: dict[str, tuple[str, str | None]]
) -> Iterator[tuple[str, str]]:
    for base in node.bases:
        target = base.value if isinstance(base, ast.Subscript) else base  # BaseEnv[Config]
        parts = _dotted(target)
        if not parts:
            continue
        head, tail = parts[0], parts[1:]
        if head in imported:
            origin, attribute = imported[head]
            full = [*origin.split("."), *([attribute] if attribute else []), *tail]
        elif tail:
            full = parts
        else:
            full = [*module.split("."), head]
        yield ".".join(full[:-1]), full[-1]


def _dotted(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return [*head, node.attr] if head else []
    return []


def _parents(item: _Class, classes: dict[tuple[str, str], _Class], modules: set[str]) -> list[tuple[str, str]]:
    """The bases of ``item`` that lie in the scanned folder."""
    keys = ((_local(module, modules), name) for module, name in item.bases)
    return [(module, name) for module, name in keys if module is not None and (module, name) in classes]


def _local(module: str, modules: set[str]) -> str | None:
    """The scanned module an import means: files may be imported by the folder's own package name (``environments.x``)
    or, as programs do, by bare name."""
    if module in modules:
        return module
    parts = module.split(".")
    for start in range(1, len(parts)):
        if (shorter := ".".join(parts[start:])) in modules:
            return shorter
    return None


def _environment_base(
    item: _Class, classes: dict[tuple[str, str], _Class], modules: set[str], seen: frozenset[tuple[str, str]]
) -> Base | None:
    key = (item.module, item.name)
    if key in seen:  # a cycle in broken source
        return None
    for module, name in item.bases:
        local = _local(module, modules)
        parent = classes.get((local, name)) if local else None
        if parent is not None and name != item.name:
            if base := _environment_base(parent, classes, modules, seen | {key}):
                return base
        elif name == _ROOT_CLASS or (name.endswith("BaseEnv") and module.startswith(("hermes_rl_mcp", "atroposlib"))):
            return "atroposlib" if module.split(".")[0] == "atroposlib" else "hermes_rl_mcp"
    return None


def _name_attribute(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == "name" for target in statement.targets):
                value = statement.value
        elif (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == "name"
        ):
            value = statement.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.isprintable():
            return value.value or None
    return None


def _info(item: _Class, base: Base, source: Source) -> EnvironmentInfo:
    doc = item.doc.strip()
    first_line = doc.splitlines()[0].strip() if doc else f"Environment from {item.file.name}"
    return EnvironmentInfo(
        name=item.own_name or item.file.stem,
        class_name=item.name,
        file_path=str(item.file.absolute()),
        description=first_line if _is_text(first_line) else ascii(first_line),
        stem=item.file.stem,
        source=source,
        base=base,
    )


def _is_text(text: str) -> bool:
    """Whether it can be sent: a lone surrogate (an undecodable byte of a file name, an escape in a string) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

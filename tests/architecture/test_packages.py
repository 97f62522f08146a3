"""Rules about the source tree that no linter checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import environments
import trainer
from hermes_rl_mcp.paths import install_root

ROOT = install_root()
PACKAGES = ("hermes_rl_mcp", "trainer", "environments")
MAX_LINES = 500
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_tree_is_looked_at() -> None:
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=relative)
def test_a_package_file_holds_only_a_docstring_constants_and_explicit_exports(path: Path) -> None:
    """No logic and no star import runs because somebody imported a module below it; what is exported is in __all__."""
    exported: set[str] = set()
    imported: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            assert node.level == 0 and "*" not in {alias.name for alias in node.names}
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            assert node.value is not None
            value = ast.literal_eval(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [ast.unparse(target) for target in targets] == ["__all__"]:
                exported = set(value)
        else:
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_docstring or isinstance(node, ast.ImportFrom), ast.unparse(node)
    assert imported <= exported, f"imported but not in __all__: {sorted(imported - exported)}"


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_what_it_is() -> None:
    trees = {relative(path): ast.parse(path.read_text()) for path in SOURCES}
    assert [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_no_function_rebinds_a_module_global() -> None:
    rebound = {
        relative(path): node.names
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    }
    assert rebound == {}


def test_the_two_plainly_named_packages_are_ours() -> None:
    """``trainer`` and ``environments`` are names that another installed package might take."""
    assert Path(str(trainer.__file__)) == ROOT / "trainer" / "__init__.py"
    assert Path(str(environments.__file__)) == ROOT / "environments" / "__init__.py"


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)


def test_the_contracts_need_nothing_but_pydantic() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "import hermes_rl_mcp.contracts as contracts\n"
        "for module in pkgutil.walk_packages(contracts.__path__, 'hermes_rl_mcp.contracts.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules if not name.startswith('_sysconfigdata')}\n"
        "    - set(sys.stdlib_module_names)))\n"
    )
    result = child(code)
    assert result.returncode == 0, result.stderr
    interpreter = child("import sys; print(*sys.modules)").stdout.split()
    pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert set(result.stdout.split()) <= {"hermes_rl_mcp"} | pydantic | set(interpreter)


@pytest.mark.parametrize("program", ["hermes_rl_mcp.server", "hermes_rl_mcp.runs", "hermes_rl_mcp.rollout_api"])
def test_the_light_processes_load_nothing_heavy(program: str) -> None:
    heavy = "{'torch', 'transformers', 'peft', 'wandb', 'datasets', 'tinker', 'numpy'}"
    result = child(f"import sys, {program}.__main__\nprint(*sorted({heavy} & set(sys.modules)))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []

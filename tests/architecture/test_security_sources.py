"""What no source file of the product may contain: ways to run text that came from elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hermes_rl_mcp", "trainer", "environments")
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "torch.load", "torch.hub.load", "numpy.load"),
}
IN_A_SANDBOX = {"environments/hermes_swe_checker.py": {"exec", "compile"}}
"""Programs that are copied into a rollout's sandbox and run there, never in a process of the product."""
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "pty"}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(node: ast.expr) -> str:
    """``a.b.c`` of a called expression; '' if it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = name_of(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"import {name}" for name in names if name.split(".")[0] in FORBIDDEN_IMPORTS)
        if isinstance(node, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if (name := name_of(node.func)) in FORBIDDEN_CALLS:
                yield name
            for flag in ("shell", "trust_remote_code", "allow_pickle"):
                value = keywords.get(flag)
                if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
                    yield f"{flag} is not False"
            if name.endswith(".from_pretrained") and name.startswith("Auto") and "trust_remote_code" not in keywords:
                yield f"{name} without trust_remote_code=False"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sec_13_sec_14_sec_17_sec_18_no_source_runs_text_that_came_from_elsewhere(path: Path) -> None:
    found = set(faults(path.read_text(encoding="utf-8")))
    assert found - IN_A_SANDBOX.get(str(path.relative_to(ROOT)), set()) == set()


@pytest.mark.parametrize(
    "bad",
    [
        *("import pickle", "from pickle import loads", "yaml.load(x)", "torch.load(f)", "eval(x)", "os.system('ls')"),
        *("subprocess.run(x, shell=True)", "f(trust_remote_code=flag)", "AutoTokenizer.from_pretrained(x)"),
    ],
)
def test_the_search_finds_what_it_looks_for(bad: str) -> None:
    assert list(faults(bad))

"""The wall clock, which people set and which jumps, names moments only; durations and deadlines are monotonic."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hermes_rl_mcp.paths import install_root

WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
ALLOWED = {
    "hermes_rl_mcp/files.py": "stamps of records, for people",
    "trainer/metrics.py": "stamps of metrics, for people",
    "trainer/calibrate.py": "when a measurement was made, for people",
    "trainer/openai_replies.py": "'created' of OpenAI's answers",
    "hermes_rl_mcp/operations/operations.py": "status limit over server restarts; an age below 0 counts as none",
    "hermes_rl_mcp/operations/context.py": "the same",
    "hermes_rl_mcp/cli/client_files.py": "in the names of backups, for people",
    "hermes_rl_mcp/dashboard/access.py": "when a session in a browser ends, also after a restart",
    "hermes_rl_mcp/cli/prune.py": "ages in days that a person names",
    "hermes_rl_mcp/runs/prune.py": "the same",
    "hermes_rl_mcp/runs/forecast/speed.py": "whether a measurement is an hour old",
    "hermes_rl_mcp/runs/launch.py": "drafts of killed launchers; their lock decides",
}


def wall_clock_uses(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (module, name) in WALL:
                yield node.lineno


def test_fi_31_durations_and_deadlines_do_not_depend_on_a_clock_that_can_be_set() -> None:
    found = {}
    root = install_root()
    for package in ("hermes_rl_mcp", "trainer", "environments"):
        for path in sorted((root / package).rglob("*.py")):
            if lines := list(wall_clock_uses(ast.parse(path.read_text()))):
                found[path.relative_to(root).as_posix()] = lines
    assert not {path: lines for path, lines in found.items() if path not in ALLOWED}
    assert set(ALLOWED) <= set(found), "a name is left in the list that is no longer needed"


def test_the_search_finds_the_wall_clock() -> None:
    text = "import time\nfrom datetime import datetime\nclock = time.time\nprint(datetime.now())\ntime.monotonic()\n"
    assert list(wall_clock_uses(ast.parse(text))) == [3, 4]
    assert Path(__file__).is_relative_to(install_root() / "tests")

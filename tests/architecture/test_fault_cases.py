"""Which fault case is tested where: every id is in the name of a test (``test_fi_07_...``), or has a reason why not.

P0 cases run in ``make test``; those of REAL also run with the real trainer, in tests that have ``real`` in their name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hermes_rl_mcp.paths import install_root

TESTS = install_root() / "tests"
_ID = re.compile(r"(?<=_)fi_(\d\d)(?=_|$)")
_REAL = re.compile(r"_real(?=_|$)")
_AWAY = {"slow", "gpu"}
"""Marks of tests that ``make test`` leaves out."""


class Case(NamedTuple):
    priority: int
    title: str
    untested: str = ""
    """Why no test has its id."""


CASES: dict[int, Case] = {
    1: Case(0, "server killed while a run is live, a new one started"),
    2: Case(0, "client shuts its server down as the SDK does"),
    3: Case(0, "only the run's supervisor killed"),
    4: Case(0, "trainer finishes while no server lives"),
    5: Case(0, "trainer crashes while no server lives"),
    6: Case(0, "trainer killed, as by the out-of-memory killer"),
    7: Case(0, "environment ends while the trainer still needs batches"),
    8: Case(0, "rollout API dies halfway"),
    9: Case(0, "stop before the trainer was started"),
    10: Case(0, "child ignores SIGTERM"),
    11: Case(0, "trainer forks a grandchild and dies"),
    12: Case(0, "grandchild in a session of its own"),
    13: Case(0, "recorded pid belongs to another process"),
    14: Case(0, "machine was restarted"),
    15: Case(0, "floods of output, long lines, bad bytes, progress bars"),
    16: Case(0, "child prints to stdout while the server speaks the protocol there"),
    17: Case(0, "wanted port taken by another program"),
    18: Case(0, "two servers start at the same moment"),
    19: Case(0, "two servers edit the configuration at once"),
    20: Case(0, "record truncated, garbage or from a newer version"),
    21: Case(0, "disk full at checkpoint, log and state"),
    22: Case(0, "kill in the middle of a checkpoint"),
    23: Case(0, "NaN loss, infinite gradient"),
    24: Case(0, "trainer alive but no step"),
    25: Case(0, "batch size does not fit the group size"),
    26: Case(0, "every group fails in the environment"),
    27: Case(0, "GPU memory exhausted at load, first step, later"),
    28: Case(0, "W&B without key, offline, hanging"),
    29: Case(1, "trainer is done but does not exit"),
    30: Case(1, "SIGTERM to the supervisor"),
    31: Case(1, "clock set back and forth"),
    32: Case(1, "trainer stopped for minutes and continued"),
    33: Case(1, "record cannot be read for a moment"),
    34: Case(1, "start repeated after a timeout"),
    35: Case(1, "start cancelled midway"),
    36: Case(1, "stop and completion race"),
    37: Case(1, "resume from good, missing and foreign checkpoints"),
    38: Case(1, "sampler not refreshed after a step"),
    39: Case(1, "model cannot be downloaded, or was half"),
    40: Case(1, "client passes almost no environment"),
    41: Case(1, "500 old runs, 2 GB of logs"),
    42: Case(1, "environment file that cannot be imported or hangs"),
    43: Case(2, "process that even SIGKILL does not end", "the kernel offers no such process on demand"),
    44: Case(2, "macOS", "no such machine is at hand; identities fall back to psutil, untested"),
    45: Case(2, "Windows", "not supported: process groups, flock and pass_fds are POSIX"),
    46: Case(2, "GPU falls off the bus, its tool hangs"),
}
ONLY_REAL = {27}
"""P0, but a scripted child has no model that outgrows its memory, and the real one takes too long for make test."""
REAL = {1, 2, 4, 5, 6, 22, 30, 34, 36, 37}


class Found(NamedTuple):
    name: str
    path: Path
    by_default: bool


def _marks(node: ast.AST) -> set[str]:
    """Names ``x`` of ``pytest.mark.x`` below ``node``."""
    return {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Attribute) and one.value.attr == "mark"
    }


def _tests() -> Iterator[Found]:
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_module: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
            ):
                of_module |= _marks(node.value)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = of_module.union(*(_marks(decorator) for decorator in node.decorator_list))
                yield Found(node.name, path, not marks & _AWAY)


@pytest.fixture(scope="module")
def found() -> dict[int, list[Found]]:
    by_id: dict[int, list[Found]] = {}
    for test in _tests():
        for number in _ID.findall(test.name):
            by_id.setdefault(int(number), []).append(test)
    return by_id


@pytest.mark.parametrize("number", CASES, ids=lambda number: f"FI-{number:02}")
def test_a_fault_case_is_tested_or_has_a_reason_why_not(number: int, found: dict[int, list[Found]]) -> None:
    case, tests = CASES[number], found.get(number, [])
    if case.untested:
        assert not tests, f"it is tested after all, by {tests[0].name}"
        return
    assert tests, f"no test has fi_{number:02} in its name: {case.title}"
    if case.priority == 0 and number not in ONLY_REAL:
        assert any(test.by_default for test in tests), f"none of {[test.name for test in tests]} runs in make test"
    if number in REAL:
        assert any(_REAL.search(test.name) for test in tests), "none says that it runs with the real trainer"


def test_a_name_holds_no_id_that_is_not_in_the_table(found: dict[int, list[Found]]) -> None:
    assert set(found) <= set(CASES), {number: found[number] for number in set(found) - set(CASES)}


def test_marks_are_seen_on_functions_and_modules() -> None:
    marks = {test.name: test.by_default for test in _tests()}
    assert marks["test_fi_36_stop_and_completion_race_to_one_end_with_its_proof"] is True
    assert marks["test_fi_36_stop_and_completion_race_to_either_end_at_any_moment"] is False

"""Which security case is tested: every id is in the name of a test (``test_sec_07_...``), or has a reason why not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from hermes_rl_mcp.paths import install_root

TESTS = install_root() / "tests"
_ID = re.compile(r"(?<=_)sec_(\d\d)(?=_|$)")


class Case(NamedTuple):
    title: str
    untested: str = ""
    """Why no test has its id."""
    rest: str = ""
    """What of the case does not apply yet, or is promised less than the case asks."""


CASES: dict[int, Case] = {
    1: Case("keys on command lines"),
    2: Case("keys in files, logs, results and resources", rest="a child's own log keeps what it printed"),
    3: Case("environment of each child", rest="the environment's process gets HF_TOKEN: gated data sets need one"),
    4: Case("secret fields in configuration, edits and errors"),
    5: Case("listeners on loopback only"),
    6: Case("rebound host names and web pages"),
    7: Case("another local process without the run's secret prefix", rest="404, as if nothing were there, not 401"),
    8: Case("bodies that cost too much, ids and paths of clients"),
    9: Case("MCP over HTTP away from loopback", rest="there is no flag that would allow it"),
    10: Case("names and addresses that lead out"),
    11: Case("links, swapped files, neighbours with a like name"),
    12: Case("hard links, pipes, devices, endless files", rest="hard links are read: installers make them"),
    13: Case("options and shell characters in names"),
    14: Case("values of the wrong type or size, objects in YAML"),
    15: Case("listing imports nothing"),
    16: Case("environments only out of the operator's folders, with their hash"),
    17: Case("a model's own code"),
    18: Case("pickles as weights"),
    19: Case("adapters of another base or with code"),
    20: Case("hostile words of a model"),
    21: Case("hostile words of environments, errors and labels; tool descriptions"),
    22: Case("forged log lines"),
    23: Case("more than the operator allows; addresses of the cloud and the local network"),
    24: Case("hints of tools that end things", rest="no tool deletes; runs belong to a user, not a client"),
    25: Case("file modes with a umask of 0"),
    26: Case("forged processes are not signalled"),
    27: Case("upload of weights", "nothing uploads weights: there is no export and no push to a hub yet"),
    28: Case("a run without a network"),
    29: Case("hosts that are sent data are named", rest="not what an environment's code sends unasked"),
    30: Case("least versions of dependencies"),
}


def ids_in_tests() -> Iterator[int]:
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield from (int(number) for number in _ID.findall(node.name))


@pytest.fixture(scope="module")
def found() -> set[int]:
    return set(ids_in_tests())


@pytest.mark.parametrize("number", CASES, ids=lambda number: f"SEC-{number:02d}")
def test_every_case_has_a_test_or_a_reason(found: set[int], number: int) -> None:
    case = CASES[number]
    assert (number in found) != bool(case.untested), f"SEC-{number:02d}: {case.title}"


def test_no_test_names_a_case_that_the_table_lacks(found: set[int]) -> None:
    assert found <= set(CASES)

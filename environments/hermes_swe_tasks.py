"""Small programming tasks with their tests: made from a seed, or rows of a data set such as HumanEval.

About one made task in ten, chosen by a hash of its text, is kept for evaluation and never trained on. Invariant: a
task's text says nothing of its tests, and every task has some.
"""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.envs.made_tasks import MadeTasks
from hermes_rl_mcp.errors import PreflightError

log = logging.getLogger(__name__)

TEST_COLUMNS = ("test", "test_code", "tests")
"""Of a data set, the first that it has."""
CASES = 6


@dataclass(frozen=True)
class SweTask:
    """What to write, and Python statements that hold of it."""

    text: str
    tests: str
    entry_point: str = ""
    """The function that HumanEval's ``check(candidate)`` is given."""


_WORDS = ("river", "apple", "stone", "cloud", "maple", "ember", "otter", "lemon", "raven", "cedar")


def _scaled(rng: random.Random) -> SweTask:
    factor, plus = rng.randrange(2, 10), rng.randrange(1, 10)
    text = f"Write a function scaled(n) that returns n times {factor} plus {plus}."
    return _made(text, "scaled", lambda n: n * factor + plus, [(rng.randrange(-50, 50),) for _ in range(CASES)])


def _clamp(rng: random.Random) -> SweTask:
    low = rng.randrange(-20, 10)
    high = low + rng.randrange(5, 30)
    text = f"Write a function clamp(n) that returns n, but at least {low} and at most {high}."
    cases = [(low - 5,), (high + 7,), *((rng.randrange(low, high),) for _ in range(CASES - 2))]
    return _made(text, "clamp", lambda n: min(max(n, low), high), cases)


def _above(rng: random.Random) -> SweTask:
    limit = rng.randrange(5, 60)
    text = f"Write a function count_above(numbers) that returns how many numbers of a list are greater than {limit}."
    cases = [([limit, *(rng.randrange(80) for _ in range(rng.randrange(8)))],) for _ in range(CASES)]
    return _made(text, "count_above", lambda numbers: sum(one > limit for one in numbers), cases)


def _every(rng: random.Random) -> SweTask:
    step, first = rng.randrange(2, 7), rng.randrange(6)
    text = (
        f"Write a function every(items) that returns a list of items[{first}] and every {step}. item after it, if any."
    )
    cases = [(rng.sample(range(50), rng.randrange(1, 20)),) for _ in range(CASES)]
    return _made(text, "every", lambda items: items[first::step], cases)


def _swap(rng: random.Random) -> SweTask:
    old, new = rng.sample("aeioulrn", 2)
    text = f"Write a function swap(text) that returns text with every {old!r} replaced by {new!r}, and in capitals."
    cases = [(" ".join(rng.sample(_WORDS, 3)),) for _ in range(CASES)]
    return _made(text, "swap", lambda text: text.replace(old, new).upper(), cases)


def _digits(rng: random.Random) -> SweTask:
    factor, modulus = rng.randrange(2, 10), rng.randrange(3, 20)
    text = f"Write a function digits(n) that returns {factor} times the sum of the digits of n >= 0, modulo {modulus}."
    cases = [(rng.randrange(10**9),) for _ in range(CASES)]
    return _made(text, "digits", lambda n: factor * sum(map(int, str(n))) % modulus, cases)


def _longer(rng: random.Random) -> SweTask:
    size, letter = rng.randrange(3, 8), rng.choice("aeioulrnpst")
    text = (
        f"Write a function longer(words) that returns the sorted words of {size} letters or more, or with a {letter!r}."
    )
    cases = [([*rng.sample(_WORDS, 4), "x" * rng.randrange(1, 9), "ox", "seven", "planets"],) for _ in range(CASES)]
    return _made(text, "longer", lambda words: sorted(one for one in words if len(one) >= size or letter in one), cases)


def _made(text: str, name: str, right: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> SweTask:
    lines = [f"assert {name}({', '.join(map(repr, case))}) == {right(*case)!r}\n" for case in cases]
    return SweTask(text, "".join(lines), name)


MAKERS: Mapping[str, Callable[[random.Random], SweTask]] = {
    "scaled": _scaled,
    "clamp": _clamp,
    "above": _above,
    "every": _every,
    "swap": _swap,
    "digits": _digits,
    "longer": _longer,
}
TASKS = MadeTasks(MAKERS)


def tasks_of(rows: Sequence[Mapping[str, Any]], asked: str, test_field: str | None) -> list[SweTask]:
    """Tasks of a data set's rows: ``asked`` is the column with the task, ``test_field`` that with the tests (None = the
    first of ``TEST_COLUMNS``). Rows without tests that Python can read are left out. Raises PreflightError."""
    columns = [test_field] if test_field else list(TEST_COLUMNS)
    tasks = [task for row in rows if (task := _of_row(row, asked, columns)) is not None]
    if rows and not tasks:
        raise PreflightError(
            f"No row of the data set has tests in {' or '.join(columns)}.",
            hint="Set test_field to the column with Python tests.",
        )
    if len(tasks) < len(rows):
        log.warning("%d of %d rows have no tests that Python can read: left out", len(rows) - len(tasks), len(rows))
    return tasks


def _of_row(row: Mapping[str, Any], asked: str, columns: Sequence[str]) -> SweTask | None:
    found = next((row[name] for name in columns if row.get(name)), None)
    if found is None:
        return None
    tests = "\n".join(map(str, found)) if isinstance(found, list) else str(found)
    whole = f"{row.get('test_setup') or ''}\n{tests}".strip()
    try:
        ast.parse(whole)
    except (SyntaxError, ValueError):
        return None
    return SweTask(str(row[asked]), whole, str(row.get("entry_point") or ""))

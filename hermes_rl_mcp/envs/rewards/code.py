"""Reward for code: the share of tests that the Python program in an answer passes.

Invariant: a test counts as passed only if the harness wrote its secret mark after it, so a program that ends itself
early, with whatever exit status, has passed nothing more.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from hermes_rl_mcp.envs.rewards.base import Answer, said
from hermes_rl_mcp.envs.rewards.execution import Limits, run_python
from hermes_rl_mcp.errors import InvalidValueError

Test = str | tuple[str, str]
"""Statements that raise when they fail (``assert add(1, 2) == 3``), or what the program reads and must then print."""

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_HARNESS = """\
import json, os, sys
job = json.loads(sys.stdin.buffer.read())
written = os.dup(1)
space = {"__name__": "answer"}
mark, tests = job["mark"], job["tests"]
exec(compile(job["code"], "answer.py", "exec"), space)
for index, test in enumerate(tests):
    try:
        exec(compile(test, "test.py", "exec"), space)
    except BaseException as error:
        print(f"test {index}: {type(error).__name__}: {error}", file=sys.stderr)
    else:
        sys.stdout.flush()
        os.write(written, f"\\n{mark} {index}\\n".encode())
"""


def python_of(text: str) -> str:
    """The last fenced Python block of a text; all of the text where there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


@dataclass(frozen=True)
class PythonTests:
    """The gold is a test or a list of tests; see ``Test``. Those with an expected output run the program anew each.

    What the limits do not cover: the program runs as this user and may read the user's files.
    """

    limits: Limits = field(default_factory=Limits)
    """Of each run."""
    all_or_nothing: bool = False
    """1 if every test passes, else 0, in place of the share."""

    async def __call__(self, answer: Answer, gold: Test | Sequence[Test]) -> float:
        return await asyncio.to_thread(self.check, said(answer), gold)

    def check(self, text: str, gold: Test | Sequence[Test]) -> float:
        """The same for callers without an event loop. Blocks. Raises InvalidValueError for a gold without tests."""
        tests = [gold] if isinstance(gold, str | tuple) else list(gold)
        if not tests:
            raise InvalidValueError("An answer was to be checked by no tests at all.", hint="Give at least one.")
        code = python_of(text)
        statements = [test for test in tests if isinstance(test, str)]
        passed = self._statements(code, statements) if statements else 0
        for test in tests:
            if not isinstance(test, str):
                stdin, expected = test
                done = run_python(code, stdin.encode(), self.limits)
                passed += done.succeeded and _lines(done.output.decode(errors="replace")) == _lines(expected)
        share = passed / len(tests)
        return float(share == 1.0) if self.all_or_nothing else share

    def _statements(self, code: str, tests: list[str]) -> int:
        mark = secrets.token_hex(16)
        job = json.dumps({"code": code, "tests": tests, "mark": mark}).encode()
        output = run_python(_HARNESS, job, self.limits).output.decode(errors="replace").splitlines()
        return sum(f"{mark} {index}" in output for index in range(len(tests)))


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]

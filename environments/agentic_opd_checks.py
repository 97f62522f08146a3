"""What a solution is worth: its text is tested in a sandbox that the agent never had, in a process beside the tests.

Invariant: nothing that the agent can write decides. Of all it leaves behind, solution.py alone is looked at; the tests
come to it as calls with plain values (``hermes_swe_checker``), and a program that ends itself early has passed nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.hermes_swe_verdict import failure_of
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.sandbox.docker import DockerOptions
from hermes_rl_mcp.agent.sandbox.factory import task_sandbox

SOLUTION = "solution.py"
PASSED, FAILED, BROKEN, MISSING = 1.0, 0.2, 0.1, 0.0
"""Correctness: all tests pass; one does not hold; the program or a test cannot be run to its end; no solution.py."""
MOST_SHOWN = 500
"""Characters of a failure."""
_OUTPUT_BYTES = 200_000
_NOT_HELD = "AssertionError: "


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a solution."""

    correctness: float
    message: str
    """Why it is not right; empty if it is."""


def check(
    ctx: ToolContext, test_code: str, timeout_s: float, *, backend: str = "local", docker: DockerOptions | None = None
) -> Verdict:
    """Of ``solution.py`` in the rollout's working directory, in a new sandbox of the same kind. Blocks."""
    with tempfile.TemporaryDirectory(prefix="hermes-rl-opd-") as folder:
        copy = Path(folder, SOLUTION)
        if not ctx.download_file(SOLUTION, copy)["success"]:
            return Verdict(MISSING, f"There is no {SOLUTION}.")
        program = copy.read_bytes()
    sandbox = task_sandbox(backend, f"{ctx.task_id}-tests", docker)
    failure = failure_of(
        {SOLUTION: program}, test_code, sandbox, backend=backend, timeout_s=timeout_s, limit_bytes=_OUTPUT_BYTES
    )
    if not failure:
        return Verdict(PASSED, "")
    if failure.startswith(_NOT_HELD):
        return Verdict(FAILED, f"This does not hold: {failure.removeprefix(_NOT_HELD)}"[:MOST_SHOWN])
    return Verdict(BROKEN, failure[:MOST_SHOWN])


def efficiency(turns: int, most_turns: int) -> float:
    """1.0 up to three turns, 0.8 up to half of what was allowed, 0.5 up to three quarters, else 0.2."""
    if turns <= 3:
        return 1.0
    if turns <= most_turns / 2:
        return 0.8
    return 0.5 if turns <= most_turns * 3 / 4 else 0.2


def tool_use(tools: Mapping[str, int]) -> float:
    """1.0 for a terminal and a tool that writes files, 0.6 for a terminal, 0.3 for anything, else 0."""
    if tools.get("terminal"):
        return 1.0 if tools.get("write_file") or tools.get("patch") else 0.6
    return 0.3 if any(tools.values()) else 0.0


def tools_called(messages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Names of tools to how often they were called."""
    counts: dict[str, int] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            name = str(call["function"]["name"])
            counts[name] = counts.get(name, 0) + 1
    return counts

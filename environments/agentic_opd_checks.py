"""Whether a solution is right: its text and the tests meet in an interpreter of their own, after the agent is done.

Invariant: nothing that the agent can write decides. Tests and the mark by which a verdict is known come over standard
input and are on no disk; a program that ends itself early, with whatever status, has passed nothing.
"""

from __future__ import annotations

import json
import secrets
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl_mcp.agent.context import ToolContext

SOLUTION = "solution.py"
PASSED, UNCLEAN, FAILED, BROKEN, MISSING = 1.0, 0.8, 0.2, 0.1, 0.0
"""Correctness: all tests pass; they pass, and then the program ends badly; a test does not hold; the program or a test
cannot be run to its end; there is no solution.py."""
MOST_SHOWN = 500
"""Characters of one failure."""

# Runs in the sandbox's own Python, 3.8 or later, with the standard library alone.
_HARNESS = """
import ast, json, os, sys, types
written = os.dup(1)
job = json.loads(sys.stdin.buffer.read())
sys.stdin = open(os.devnull)
module = sys.modules["solution"] = types.ModuleType("solution")
space, failed, broken = module.__dict__, [], None
def told(error):
    return "%s: %s" % (type(error).__name__, error)
try:
    exec(compile(job["code"], "solution.py", "exec"), space)
except BaseException as error:
    broken = "solution.py raises " + told(error)
if broken is None:
    for part in ast.parse(job["tests"]).body:
        shown = ast.get_source_segment(job["tests"], part)
        try:
            exec(compile(ast.Module([part], []), "tests", "exec"), space)
        except AssertionError as error:
            try:
                left = getattr(getattr(part, "test", None), "left", None)
                value = eval(compile(ast.Expression(left), "tests", "eval"), space) if left else None
                shown += "  # found %r" % (value,) if left else ""
            except BaseException:
                pass
            failed.append("this does not hold: " + shown)
        except BaseException as error:
            broken = "%s raises %s" % (shown, told(error))
            break
sys.stdout.flush()
os.write(written, ("\\n" + job["mark"] + json.dumps({"failed": failed, "broken": broken}) + "\\n").encode())
"""


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a solution."""

    correctness: float
    message: str
    """Why it is not right; empty if it is."""

    @property
    def passed(self) -> bool:
        return self.correctness >= UNCLEAN


def check(ctx: ToolContext, test_code: str, timeout_s: float) -> Verdict:
    """Of ``solution.py`` in the rollout's working directory. What the agent left running is ended first. Blocks."""
    for one in json.loads(ctx.call_tool("process", {"action": "list"})).get("processes", []):
        ctx.call_tool("process", {"action": "kill", "session_id": one["session_id"]})
    with tempfile.TemporaryDirectory(prefix="hermes-rl-opd-") as folder:
        copy = Path(folder, SOLUTION)
        if not ctx.download_file(SOLUTION, copy)["success"]:
            return Verdict(MISSING, f"There is no {SOLUTION}.")
        code = copy.read_text(encoding="utf-8", errors="replace")
    mark = secrets.token_hex(16)
    job = json.dumps({"code": code, "tests": test_code, "mark": mark})
    python = f"python3 -I -S -B -c {shlex.quote(_HARNESS)}"
    home = '"$folder"'
    command = (
        f'folder=$(mktemp -d) && cd {home} && exec env -i PATH="$PATH" HOME={home} TMPDIR={home} LANG=C.UTF-8 '
        f"{python} <<'{mark}'\n{job}\n{mark}\n"
    )
    done = ctx.terminal(command, timeout=timeout_s)
    said = [line for line in str(done["output"]).splitlines() if line.startswith(mark)]
    if not said:
        why = done["error"] or str(done["output"]).strip()[-MOST_SHOWN:] or f"it ended with {done['exit_code']}"
        return Verdict(BROKEN, f"The program did not come to its end under the tests: {why}")
    found = json.loads(said[-1].removeprefix(mark))
    if found["broken"]:
        return Verdict(BROKEN, str(found["broken"])[:MOST_SHOWN])
    if found["failed"]:
        return Verdict(FAILED, str(found["failed"][0])[:MOST_SHOWN])
    if done["exit_code"] != 0:
        return Verdict(UNCLEAN, f"The tests pass, and then the program ends with {done['exit_code']}.")
    return Verdict(PASSED, "")


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

"""Rewards for mathematics, read and compared by math-verify.

``BoxedNumber`` computes here: what could take long is refused beforehand. ``MathAnswer`` takes any expression and asks
a helper process that ends itself when its time is up, because math-verify's own limits rest on a signal that only a
main thread can take. Invariant: no answer can hold up training or raise; what cannot be read is wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from hermes_rl_mcp.envs.rewards.base import Answer, said
from hermes_rl_mcp.paths import install_root

log = logging.getLogger(__name__)

LONGEST_BOX = 64
"""Characters of a boxed number. None needs more, and the parser's time grows with length."""
LONGEST_ANSWER = 4000
"""Characters that ``MathAnswer`` reads, from the end."""
_COMMANDS = {"frac", "dfrac", "tfrac", "text", "textbf", "mathrm", "times", "cdot", "div", "left", "right", "quad"}
"""LaTeX that a number may contain. Sums, limits, binomials and the like can be made to compute for ever."""
_POWER = re.compile(r"\^(?!\{?\d\}?(?!\d))|\*\*")
"""Any power but one with a one-digit exponent."""
_WRAPPED = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf))?\{([^{}]*)\}")
_TRAILING = re.compile(r"(?:\s|\\[ ,;]|\.)+$")
"""Spaces and the full stop of a sentence that was put into the box."""


def last_box(text: str) -> str | None:
    """What is inside the last ``\\boxed{...}`` after the last ``</think>``; None without a box, or one left open."""
    answer = said(text)
    start = answer.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[end], 0)
        if depth == 0:
            return answer[start + len("\\boxed{") : end]
    return None


def parse_number(box: str) -> list[Any]:
    """What math-verify makes of a boxed answer; empty if it is no number or not safe to compute."""
    from math_verify import LatexExtractionConfig, parse

    if len(box) > LONGEST_BOX:
        return []
    box = _TRAILING.sub("", box.replace("\\!", "")).strip()
    if wrapped := _WRAPPED.fullmatch(box):
        box = wrapped[1]
    commands = set(re.findall(r"\\([a-zA-Z]+)", box))
    if "!" in box or box.count("^") > 1 or _POWER.search(box) or commands - _COMMANDS:
        return []
    extraction = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    parsed = parse(f"$\\boxed{{{box}}}$", extraction_config=extraction, parsing_timeout=None)
    return list(parsed) if parsed and _is_number(parsed[0]) else []


def same_number(gold: list[Any], number: list[Any]) -> bool:
    """Whether two results of ``parse_number`` are equal; an empty one equals nothing."""
    from math_verify import verify

    return bool(gold) and bool(number) and bool(verify(gold, number, timeout_seconds=None))


def hush() -> None:
    """The parser warns about every process that turns its timeouts off; the text above says why we do."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_number(value: Any) -> bool:
    if getattr(value, "is_Equality", False):  # x = 72
        value = value.rhs
    # What is written as a quotient (72 %) stays one until it is evaluated; only then it is known to be finite.
    return bool(getattr(value, "is_number", False) and value.doit().is_finite)


@dataclass(frozen=True)
class BoxedNumber:
    """1 if the last box holds the gold number, however it is written; ``format_value`` for another number."""

    format_value: float = 0.0

    def __call__(self, answer: Answer, gold: str) -> float:
        box = last_box(said(answer))
        number = parse_number(box) if box is not None else []
        if same_number(parse_number(gold), number):
            return 1.0
        return self.format_value if number else 0.0


@dataclass(eq=False)
class MathAnswer:
    """1 if math-verify takes the answer for equal to the gold expression (LaTeX or plain), else 0.

    One helper process is kept; it is started at the first answer and ends with this object or this process.
    """

    time_limit_s: int = 5
    """Processor time for reading and comparing one answer. Then it is wrong and the helper is begun anew."""
    timed_out: int = field(default=0, init=False)
    """Answers that ran out of time."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[str] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    async def __call__(self, answer: Answer, gold: str) -> float:
        return await asyncio.to_thread(self.check, said(answer), gold)

    def check(self, text: str, gold: str) -> float:
        """The same for callers without an event loop. Blocks, from any thread."""
        with self._lock:
            helper = self._running()
            assert helper.stdin is not None and helper.stdout is not None
            question = {"gold": gold, "answer": text[-LONGEST_ANSWER:], "limit_s": self.time_limit_s}
            try:
                helper.stdin.write(json.dumps(question) + "\n")
                helper.stdin.flush()
                reply = helper.stdout.readline()
            except OSError:
                reply = ""
            if not reply:
                self._end()
                self.timed_out += 1
                log.warning(
                    "an answer was not checked within %d s of processor time; it counts as wrong", self.time_limit_s
                )
                return 0.0
            return float(bool(json.loads(reply)))

    def close(self) -> None:
        """Ends the helper. A later answer starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._helper is None:
            self._helper = subprocess.Popen(
                [sys.executable, "-P", "-m", "hermes_rl_mcp.envs.rewards.math_helper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={"PYTHONPATH": str(install_root()), "PATH": "/usr/bin:/bin"},
            )
            self._finalizer = weakref.finalize(self, _finish, self._helper)
        return self._helper

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._helper = self._finalizer = None


def _finish(helper: subprocess.Popen[str]) -> None:
    helper.kill()
    helper.wait()
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                log.debug("the helper was gone before its last question")

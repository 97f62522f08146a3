"""The process that reads and compares expressions for ``MathAnswer``: a JSON question a line; answers true or false.

Invariant: it outlives neither its parent nor the time of one question, which is processor time: what is right stays
right on a busy machine. The alarms have no handlers: they end the process even inside code that never comes back to the
interpreter.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MEMORY_BYTES = 4 * 2**30
LOADING_S = 120
"""For the import of sympy on a busy machine; not counted to the first question."""
CLOCK_SHARE = 20
"""So many times the processor time may pass by the clock."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.alarm(LOADING_S)
    import math_verify  # noqa: F401 - loaded before a question's time begins

    from hermes_rl_mcp.envs.rewards.maths import hush

    hush()
    signal.alarm(0)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["limit_s"])
        signal.alarm(question["limit_s"] * CLOCK_SHARE)
        try:
            equal = same(question["gold"], question["answer"])
        except Exception:  # noqa: BLE001 - the parser raises whatever sympy does; what cannot be read is wrong
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        sys.stdout.write(json.dumps(equal) + "\n")
        sys.stdout.flush()


def same(gold: str, answer: str) -> bool:
    """A gold text without any mark of mathematics is taken as LaTeX."""
    from math_verify import parse, verify

    marked = any(mark in gold for mark in ("$", "\\boxed", "\\(", "\\["))
    wanted = parse(gold if marked else f"${gold}$", parsing_timeout=None)
    given = parse(answer, parsing_timeout=None)
    return bool(wanted) and bool(given) and bool(verify(wanted, given, timeout_seconds=None))


if __name__ == "__main__":
    main()

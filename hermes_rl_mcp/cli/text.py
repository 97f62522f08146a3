"""Text that came from a model, a log or a file, made fit for a terminal.

Nothing printed through here can move the cursor, set colours or hide itself.
"""

from __future__ import annotations

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.untrusted import HIDDEN


def printable(text: str, limit: int | None = None) -> str:
    """Hidden characters become ``·``; longer text is cut at ``limit`` characters with an ellipsis."""
    safe = HIDDEN.sub("·", text)
    return safe if limit is None or len(safe) <= limit else safe[: limit - 1] + "…"


def flagged(flag: Flag) -> str:
    """What was seen and what to do, as two sentences."""
    return f"{flag.evidence.rstrip('.')}. {flag.advice}"


def number(value: object) -> str:
    """A metric for people; ``-`` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value), 200)
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"

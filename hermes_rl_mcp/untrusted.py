"""Text that a model, an environment, a log or a file wrote, made fit to be shown: data, never instructions.

Nothing that went through here can act on a terminal, hide itself, change the reading order or look like lines of ours.
Everything that goes to an agent passes here once, on its way out.
"""

from __future__ import annotations

import re
from typing import Any

from hermes_rl_mcp.contracts.results import NOTICE
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError, PreflightError

MAX_CHARS = 4_000
"""Of one string inside a result; all of it is in the file it came from."""
MAX_ANSWER_CHARS = 20_000
"""Of an answer's text: a model has to read it, and this is under 8,000 tokens also where it is mostly figures."""
QUOTE = "| "
"""Before each further line of a text with several, so that no line of it passes for one of ours."""

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls but tab and newline: terminals obey them
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufeff"  # invisible, or blank like a space
    "\u200b-\u200f\u202a-\u202e\u2028\u2029\u2060-\u206f"  # zero width, direction of writing, other line ends
    "\ufe00-\ufe0f\U000e0000-\U000e0fff"  # variation selectors and tags: text that nobody sees but a model reads
    "\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\ud800-\udfff\ue000-\uf8ff\U000f0000-\U0010ffff"  # half characters, and those that mean nothing
    "]"
)


def shown(text: str, limit: int = MAX_CHARS) -> str:
    """``text`` with hidden characters written as escapes; longer than ``limit`` it is cut and says so."""
    cut = len(text) - limit
    if cut > 0:
        text = text[:limit]
    if not (
        text.isascii() and text.isprintable()
    ):  # most are, and asking is quicker than looking for what is not there
        text = HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)
    return f"{text}… [{cut} more characters]" if cut > 0 else text


def shown_values(value: Any, limit: int = MAX_CHARS) -> Any:
    """A copy of JSON-like data in which every string, also of keys, is ``shown``."""
    if isinstance(value, str):
        return shown(value, limit)
    if isinstance(value, dict):
        return {shown(str(key), limit): shown_values(item, limit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown_values(item, limit) for item in value]
    return value


def shown_error(error: HermesRLError) -> dict[str, Any]:
    """Its payload, made harmless; one that may quote a traceback or a log says so."""
    quotes = isinstance(error, EnvironmentFileError | PreflightError)
    shown_payload: dict[str, Any] = shown_values(error.payload)
    return {**shown_payload, **({"untrusted": f"error: {NOTICE}"} if quotes else {})}


def quoted_values(value: Any) -> Any:
    """A copy of JSON-like data whose strings can stand in a line of ours: their further lines are marked as quoted."""
    if isinstance(value, str):
        return value.replace("\n", f"\n{QUOTE}") if "\n" in value else value
    if isinstance(value, dict):
        return {quoted_values(key): quoted_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [quoted_values(item) for item in value]
    return value

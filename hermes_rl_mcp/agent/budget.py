"""How much of the tools' results a model gets to see; the rest lies in the sandbox, where it can be read on.

Invariant: no result is lost unsaid: what a model does not see whole says how long it is and where it lies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hermes_rl_mcp.agent.interfaces import ChatMessage, Sandbox, Tool

DEFAULT_RESULT_CHARS = 100_000
PINNED: Mapping[str, float] = {"read_file": math.inf}
"""Reading a kept result must not make another one to keep."""
FOLDER = "hermes-results"
TAG = "persisted-output"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_NAME_CHARS = 100


@dataclass(frozen=True)
class BudgetConfig:
    """Sizes in characters."""

    default_result_size: float = DEFAULT_RESULT_CHARS
    turn_budget: float = 200_000
    """Of all results of one turn together."""
    preview_size: int = 1_500
    tool_overrides: Mapping[str, float] = field(default_factory=dict)
    """Per tool, before what the tool says itself; not for ``read_file``."""

    def limit(self, name: str, tool: Tool | None) -> float:
        """The longest result of this tool that is shown whole."""
        if name in PINNED:
            return PINNED[name]
        if name in self.tool_overrides:
            return self.tool_overrides[name]
        if tool is not None and tool.result_size_chars != DEFAULT_RESULT_CHARS:
            return tool.result_size_chars
        return self.default_result_size


def within_turn(results: list[ChatMessage], budget: BudgetConfig, sandbox: Callable[[], Sandbox]) -> None:
    """Replaces the largest of a turn's tool messages by previews until all fit, pinned tools' last. Blocks."""
    order = sorted(results, key=lambda one: (one.get("name") in PINNED, -len(one["content"])))
    total = sum(len(one["content"]) for one in results)
    for message in order:
        if total <= budget.turn_budget:
            return
        text = message["content"]
        if len(text) <= budget.preview_size or text.startswith(f"<{TAG}>"):
            continue  # thousands of short answers are not to become thousands of files
        shorter = kept(text, message["tool_call_id"], budget.preview_size, sandbox)
        if len(shorter) < len(text):
            message["content"] = shorter
            total += len(shorter) - len(text)


def kept(text: str, call_id: str, preview_size: int, sandbox: Callable[[], Sandbox]) -> str:
    """A preview of ``text``, which goes to a file of the sandbox. Blocks."""
    preview = text[:preview_size]
    name = _UNSAFE.sub("_", call_id)[:_NAME_CHARS].lstrip(".") or "result"
    try:
        place = sandbox()
        path = f"{place.tmpdir}/{FOLDER}/{name}.txt"
        place.write_bytes(path, text.encode(errors="replace"))
    except OSError as error:
        return f"{preview}\n[Cut here: {len(preview)} of {len(text)} characters; the rest could not be kept: {error}]"
    return (
        f"<{TAG}>\nThe result has {len(text)} characters and was saved to {path}\n"
        f"Read more of it with read_file (offset, limit) or search it.\n\n"
        f"The first {len(preview)} characters:\n{preview}\n</{TAG}>"
    )

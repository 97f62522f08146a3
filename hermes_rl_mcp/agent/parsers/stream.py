"""A model's text as it comes in pieces: what may be shown already, and the calls at the end.

Invariant: no part of a block is ever shown, wherever the pieces are cut; the end is what ``parse`` says of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from hermes_rl_mcp.agent.interfaces import Parsed, ToolSchema
from hermes_rl_mcp.agent.parsers.blocks import BlockParser


class Stream:
    """Pieces in, plain text out, until the first block opens."""

    def __init__(self, parser: BlockParser, tools: Sequence[ToolSchema] = ()) -> None:
        self._parser = parser
        self._tools = tools
        self._text = ""
        self._shown = 0
        self._marks = (*parser.openers, *parser.closers)

    def feed(self, piece: str) -> str:
        """What ``piece`` adds to the text that may be shown; empty from the first block on."""
        self._text += piece
        safe = self._safe()
        shown, self._shown = self._text[self._shown : safe], max(self._shown, safe)
        return shown

    def end(self) -> Parsed:
        """The whole, taken apart."""
        return self._parser.parse(self._text, self._tools)

    def _safe(self) -> int:
        """Up to the first mark, or to what could become one."""
        # A mark can begin at most one character less than its length before what was looked through last.
        found = [at for mark in self._marks if (at := self._text.find(mark, self._shown)) >= 0]
        if found:
            return min(found)
        held = 0
        for mark in self._marks:
            for count in range(min(len(mark) - 1, len(self._text) - self._shown), 0, -1):
                if self._text.endswith(mark[:count]):
                    held = max(held, count)
                    break
        return len(self._text) - held

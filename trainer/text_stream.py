"""The text of one completion while its tokens come: whole characters, and nothing that a stop string may take back.

Invariant: the pieces, joined, are the text of the reply without streaming (``sampling_requests.completion_text``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNDECIDED = "\ufffd"
"""What tokenizers write for bytes that are no whole character, or not yet."""
_MOST_UNDECIDED = 3
"""Such marks at the end that one more token can turn into a character: some tokenizers write one for each byte."""


class TextStream:
    """Use from one thread. ``decode`` leaves special tokens out, as the final text does."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stop_strings
        self._ids: list[int] = []
        self._begin = 0
        """Of the ids that are decoded: those settled last, which tell how the new ones begin, and the new ones."""
        self._settled = 0
        self._text = ""
        """Of the settled ids, all of them."""
        self._sent = 0

    def push(self, token: int) -> str:
        """What can be sent now that this token has come."""
        self._ids.append(token)
        before = self._decode(self._ids[self._begin : self._settled])
        text = self._decode(self._ids[self._begin :])
        if not text.startswith(before):
            return ""
        fresh = text[len(before) :]
        if not fresh.endswith(_UNDECIDED):
            self._text += fresh
            self._begin, self._settled = self._settled, len(self._ids)
            return self._sendable(self._text)
        undecided = min(_MOST_UNDECIDED, len(fresh) - len(fresh.rstrip(_UNDECIDED)))
        return self._sendable(self._text + fresh[:-undecided])

    def rest(self, final_text: str) -> str:
        """What of the completion's whole text is still to be sent."""
        return final_text[self._sent :]

    def _sendable(self, text: str) -> str:
        ends = [at for stop in self._stops if (at := text.find(stop, self._sent)) >= 0]
        end = min([len(text) - max((_begun(text, stop) for stop in self._stops), default=0), *ends])
        piece = text[self._sent : end]
        self._sent += len(piece)
        return piece


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``, but not all of it."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

"""Submissions that are sent again because their answer was lost: recognised by their bytes, answered as the first was.

Invariant: of one body at most ``duplicate_repeats`` repetitions within ``duplicate_window_s`` are taken for such, so a
policy that always says the same is not starved; and nothing is remembered for longer than that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from hermes_rl_mcp.rollout_api.limits import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of the groups of one request. ``buffer_size``: sequences left in the last buffer that got one."""

    groups: int
    buffered: int
    buffer_size: int


@dataclass(slots=True)
class _Seen:
    at: float
    answer: Submission
    repeats: int = 0


class Repetitions:
    """Bodies stored not long ago, by digest, oldest first."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def known(self, digest: str) -> Submission | None:
        """The answer to the first of these, if this is one more of it."""
        seen = self._seen.get(digest)
        if seen is None or self._clock() - seen.at > self._limits.duplicate_window_s:
            return None
        if seen.repeats >= self._limits.duplicate_repeats:
            return None
        seen.repeats += 1
        log.info("The same %d groups were sent again; stored once", seen.answer.groups)
        return seen.answer

    def remember(self, digest: str, answer: Submission) -> None:
        now = self._clock()
        self._seen.pop(digest, None)
        self._seen[digest] = _Seen(now, answer)
        while now - next(iter(self._seen.values())).at > self._limits.duplicate_window_s:
            del self._seen[next(iter(self._seen))]

    def clear(self) -> None:
        self._seen.clear()

"""Rewards for how an answer is built, whatever it says: its tags, its length, its repetitions. They need no gold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.envs.rewards.base import Answer, text_of
from hermes_rl_mcp.errors import InvalidValueError

_NAME = re.compile(r"[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Tags:
    """1 if the answer has ``<a>...</a>`` of every name once, in this order, none empty and none inside another."""

    names: tuple[str, ...] = ("think", "answer")
    only: bool = False
    """Whether nothing but space may stand outside of them."""

    def __post_init__(self) -> None:
        given: object = self.names
        if isinstance(given, str) or not self.names or not all(_NAME.fullmatch(one) for one in self.names):
            raise InvalidValueError(
                f"Tags({self.names!r}): these are no names of tags.", hint='Give a tuple: Tags(("think", "answer")).'
            )

    def __call__(self, answer: Answer, gold: Any = None) -> float:
        text = text_of(answer)
        end = 0
        for name in self.names:
            opening, closing = f"<{name}>", f"</{name}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return 0.0
            start, stop = text.index(opening), text.index(closing)
            inside = text[start + len(opening) : stop]
            if start < end or stop < start or not inside.strip():
                return 0.0
            if self.only and text[end:start].strip():
                return 0.0
            end = stop + len(closing)
        return float(not (self.only and text[end:].strip()))


@dataclass(frozen=True)
class Length:
    """1 up to ``wanted``, falling in a straight line to 0 at ``limit``. Tokens of a completion, words of a text."""

    limit: int
    wanted: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.wanted < self.limit:
            raise InvalidValueError(
                f"Length(limit={self.limit}, wanted={self.wanted}): wanted must lie between 0 and limit.",
                hint="Raise limit or lower wanted.",
            )

    def __call__(self, answer: Answer, gold: Any = None) -> float:
        length = len(answer.split()) if isinstance(answer, str) else len(answer.token_ids)
        return 1.0 - min(1.0, max(0, length - self.wanted) / (self.limit - self.wanted))


@dataclass(frozen=True)
class Repetition:
    """Minus the share of word n-grams that were there before: 0 without repetition, towards -1 for a loop."""

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidValueError(f"Repetition(n={self.n}): n must be at least 1.", hint="3 suits prose.")

    def __call__(self, answer: Answer, gold: Any = None) -> float:
        words = text_of(answer).casefold().split()
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        return len(set(grams)) / len(grams) - 1.0 if grams else 0.0

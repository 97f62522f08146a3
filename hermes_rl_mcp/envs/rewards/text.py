"""Rewards for text that can be compared with a wanted text: the same, nearly the same, how many edits away.

Invariant: every value lies between 0 and 1 and is 1 for equal texts. Thoughts before ``</think>`` never count.
"""

from __future__ import annotations

import difflib
import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from hermes_rl_mcp.envs.rewards.base import Answer, said

LONGEST_COMPARED = 4000
"""Characters of either text; the time of a comparison grows with the product of both lengths."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INTEGER = re.compile(r"(?<![\w.])-?[0-9]{1,18}(?![\w]|\.[0-9])")
"""No longer ones: int() refuses thousands of digits."""


def normalised(text: str, *, case: bool = False, punctuation: bool = True) -> str:
    """One space between words, none around, Unicode in one form; by default lower case."""
    text = unicodedata.normalize("NFKC", text)
    text = text if case else text.casefold()
    text = text if punctuation else text.translate(_PUNCTUATION)
    return " ".join(text.split())


def last_integer(text: str) -> int | None:
    """The last whole number that stands alone in the text; None without one."""
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None


@dataclass(frozen=True)
class Exact:
    """1 if the answer is the gold text, or one of several; else 0."""

    case: bool = False
    """Whether capitals count."""
    punctuation: bool = True
    """Whether punctuation counts."""

    def __call__(self, answer: Answer, gold: str | Sequence[str]) -> float:
        golds = [gold] if isinstance(gold, str) else gold
        given = normalised(said(answer), case=self.case, punctuation=self.punctuation)
        return float(any(given == normalised(one, case=self.case, punctuation=self.punctuation) for one in golds))


@dataclass(frozen=True)
class Fuzzy:
    """How alike answer and gold are: twice the characters in common blocks over all characters of both."""

    threshold: float = 0.0
    """Below it the value is 0."""

    def __call__(self, answer: Answer, gold: str) -> float:
        left, right = (normalised(one)[:LONGEST_COMPARED] for one in (said(answer), gold))
        value = difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()
        return value if value >= self.threshold else 0.0


@dataclass(frozen=True)
class EditDistance:
    """1 minus the edits from answer to gold over the length of the longer one."""

    case: bool = True
    """Whether capitals count."""

    def __call__(self, answer: Answer, gold: str) -> float:
        left, right = (normalised(one, case=self.case)[:LONGEST_COMPARED] for one in (said(answer), gold))
        longer = max(len(left), len(right))
        return 1.0 - edit_distance(left, right) / longer if longer else 1.0


def edit_distance(left: str, right: str) -> int:
    """Insertions, deletions and replacements of one character from ``left`` to ``right`` (Levenshtein)."""
    if len(left) < len(right):
        left, right = right, left
    row = list(range(len(right) + 1))
    for i, one in enumerate(left, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(right, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (one != other))
    return row[-1]

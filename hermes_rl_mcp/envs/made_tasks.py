"""Tasks that are made from a seed, about one in ten of which is for evaluation only.

Invariant: which ones depends on a task's text alone, so runs with other seeds agree and none is trained on and asked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

HELD_OUT_ONE_IN = 10
DRAWS_PER_TASK = 1000
"""Bound on redrawing; at one in ten the chance to need more is below 1e-45."""
REPEATS_AT_THE_END = 300
"""Held-out draws in a row that were all known already: there is (nearly) no other."""


class HasText(Protocol):
    @property
    def text(self) -> str: ...


Task = TypeVar("Task", bound=HasText)


class MadeTasks(Generic[Task]):
    """``makers``: what makes a task of each kind."""

    def __init__(self, makers: Mapping[str, Callable[[random.Random], Task]]) -> None:
        self._makers = makers

    def draw(self, rng: random.Random, kinds: Sequence[str], *, held_out: bool = False) -> Task:
        """The next task of one of the wanted kinds."""
        for _ in range(DRAWS_PER_TASK):
            task = self._makers[rng.choice(list(kinds))](rng)
            if is_held_out(task) == held_out:
                return task
        raise AssertionError(f"kinds {', '.join(kinds)} have no task with held_out={held_out}")

    def for_evaluation(self, kinds: Sequence[str], count: int) -> list[Task]:
        """Up to ``count`` different held-out tasks, always the same ones, of every kind that has some."""
        rng = random.Random("evaluation")
        found: dict[str, Task] = {}
        repeats = 0
        while len(found) < count and repeats < REPEATS_AT_THE_END:
            task = self.draw(rng, kinds, held_out=True)
            repeats = repeats + 1 if task.text in found else 0
            found.setdefault(task.text, task)
        return list(found.values())


def is_held_out(task: HasText) -> bool:
    digest = hashlib.sha256(task.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0

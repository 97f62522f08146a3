"""What a reward is, and how several make one score.

Invariant: every part is kept as it was measured; weights touch the sum alone, so the parts in logs compare over runs
with other weights.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.envs.base import Score
from hermes_rl_mcp.envs.trajectory import Completion
from hermes_rl_mcp.errors import InvalidValueError

Answer = Completion | str
"""What a reward is asked about."""
Reward = Callable[[Any, Any], float | Awaitable[float]]
"""``reward(answer, gold)``: a finite number, 1.0 for what is wanted unless the reward says otherwise."""

END_OF_THOUGHT = "</think>"


def text_of(answer: Answer) -> str:
    """All of the text, thoughts included."""
    return answer if isinstance(answer, str) else answer.text


def said(answer: Answer) -> str:
    """The text after the last ``</think>``: what counts as the answer."""
    return text_of(answer).rsplit(END_OF_THOUGHT, 1)[-1]


@dataclass(frozen=True)
class Part:
    """One reward and what it counts."""

    reward: Reward
    weight: float


@dataclass(frozen=True)
class Combined:
    """The weighted sum of named rewards, which are measured side by side where they wait for something."""

    parts: Mapping[str, Part]

    async def __call__(self, answer: Answer, gold: Any = None, **golds: Any) -> Score:
        """``golds``: for single parts, by name, in place of ``gold``. Raises what a part raises, and InvalidValueError
        for a part that gives no finite number or a name that no part has."""
        if unknown := sorted(set(golds) - set(self.parts)):
            raise InvalidValueError(
                f"There is no reward part {unknown[0]!r} to compare with a gold answer of its own.",
                hint=f"Parts are {', '.join(self.parts)}.",
            )

        async def measured(name: str, part: Part) -> float:
            value = part.reward(answer, golds.get(name, gold))
            return _finite(name, await value if inspect.isawaitable(value) else value)

        values = await asyncio.gather(*(measured(name, part) for name, part in self.parts.items()))
        found = dict(zip(self.parts, values, strict=True))
        return Score(sum(self.parts[name].weight * value for name, value in found.items()), found)


def combine(parts: Mapping[str, Reward | tuple[Reward, float]]) -> Combined:
    """``combine({"correct": BoxedNumber(), "format": (Tags(("think", "answer")), 0.2)})``; without a weight it is 1.

    What comes back is awaited: ``return await reward(completion, item.gold)`` in an async ``score_answer``, or the
    coroutine itself is returned from a plain one. Raises InvalidValueError for no parts, a weight that is not finite or
    a reward that cannot be called.
    """
    if not parts:
        raise InvalidValueError("A reward of no parts was to be combined.", hint="Name at least one.")
    made = {}
    for name, given in parts.items():
        reward, weight = given if isinstance(given, tuple) else (given, 1.0)
        if not callable(reward):
            raise InvalidValueError(
                f"The reward part {name!r} is {reward!r}, which cannot be called.", hint="Give an instance or function."
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise InvalidValueError(
                f"The weight of the reward part {name!r} is {weight!r}.", hint="Weights are finite numbers."
            )
        made[name] = Part(reward, float(weight))
    return Combined(made)


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidValueError(
            f"The reward part {name!r} gave {value!r}, which is no finite number.", hint="Correct that reward."
        )
    return number

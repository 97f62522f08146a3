"""Small things to do in a terminal, made from a seed, and what the resulting file is worth.

About one task in ten is kept for evaluation and never trained on, whatever the seed.
Invariant: the reward depends on the one file that the task names and on nothing that the agent says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hermes_rl_mcp.envs import Score
from hermes_rl_mcp.envs.made_tasks import MadeTasks

EXACT, CONTAINED, WRONG = 1.0, 0.5, 0.0
SPARE_CHARS = 60
"""How much may stand around the expected text for ``CONTAINED``: a file with every possible answer is none."""
MOST_NUMBERS = 3
"""Different numbers around a number as the expected text, itself included: a sum may be written out, but a list of all
that it could be is no answer."""
_NUMBER = re.compile(r"\d+")

_PLACES = ("Oslo", "Lima", "Kyoto", "Cairo", "Quito", "Perth", "Turin", "Accra", "Davos", "Minsk", "Pune", "Reno")
_GREETINGS = ("Hello", "Good morning", "Greetings", "Welcome", "Good evening")
_WORDS = ("pear", "fig", "plum", "kiwi", "lime", "date", "apple", "mango", "peach", "grape", "lemon", "quince")


@dataclass(frozen=True)
class TerminalTask:
    """What to do, and what file has to be there afterwards with what in it."""

    text: str
    path: str
    """Relative paths start at the working directory; ``~`` is the home of the sandbox."""
    expected: str
    files: Mapping[str, str] = field(default_factory=dict)
    """What is there before: path to content."""


def _greeting(rng: random.Random) -> TerminalTask:
    said = f"{rng.choice(_GREETINGS)} from {rng.choice(_PLACES)}!"
    return TerminalTask(f"Create the file ~/greeting.txt with this text: {said}", "~/greeting.txt", said)


def _count(rng: random.Random) -> TerminalTask:
    first, many = rng.randrange(1, 40), rng.randrange(4, 12)
    text = f"Write the numbers from {first} to {first + many} into ~/count.txt, one per line."
    return TerminalTask(text, "~/count.txt", "\n".join(str(first + n) for n in range(many + 1)))


def _answer(rng: random.Random) -> TerminalTask:
    left, right = rng.randrange(100, 1000), rng.randrange(100, 1000)
    return TerminalTask(f"Write the sum of {left} and {right} to ~/answer.txt.", "~/answer.txt", str(left + right))


def _result(rng: random.Random) -> TerminalTask:
    word, lines = rng.choice(_WORDS), [rng.choice(_WORDS) for _ in range(rng.randrange(15, 60))]
    text = f"How many lines of ~/list.txt say {word}? Write the number to ~/result.txt."
    return TerminalTask(
        f"{text} The file has {len(lines)} lines.",
        "~/result.txt",
        str(lines.count(word)),
        {"~/list.txt": "".join(f"{line}\n" for line in lines)},
    )


def _sorted(rng: random.Random) -> TerminalTask:
    words = rng.sample(_WORDS, rng.randrange(4, 9))
    text = f"Sort the {len(words)} lines of ~/words.txt, {words[0]} to {words[-1]}, by the alphabet into ~/sorted.txt."
    return TerminalTask(
        text, "~/sorted.txt", "\n".join(sorted(words)), {"~/words.txt": "".join(f"{one}\n" for one in words)}
    )


MAKERS: Mapping[str, Callable[[random.Random], TerminalTask]] = {
    "greeting": _greeting,
    "count": _count,
    "answer": _answer,
    "result": _result,
    "sorted": _sorted,
}
TASKS = MadeTasks(MAKERS)


def grade(task: TerminalTask, found: str | None, called: bool, call_weight: float = 0.0) -> Score:
    """``found``: what the file holds, None if there is none. ``called``: whether any call of the agent was carried out.

    1.0 for exactly the expected text (space around it aside), 0.5 where it stands in little else, 0.0 otherwise; of
    that ``call_weight`` goes to ``called``.
    """
    worth = WRONG if found is None else _worth(found.strip(), task.expected.strip())
    parts = {"correct": float(worth == EXACT), "partial": float(worth == CONTAINED), "called": float(called)}
    return Score((1 - call_weight) * worth + call_weight * called, parts)


def _worth(found: str, expected: str) -> float:
    if found == expected:
        return EXACT
    whole = f" {' '.join(found.split())} "
    is_short = len(found) <= len(expected) + SPARE_CHARS
    if expected.isdecimal() and len({expected, *_NUMBER.findall(found)}) > MOST_NUMBERS:
        return WRONG
    return CONTAINED if is_short and f" {' '.join(expected.split())} " in whole else WRONG

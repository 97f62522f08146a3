"""What should have been known before a turn: taken from what came of it, by rules or by a judge.

Invariant: a hint is one text of bounded length, or there is none; a judge that says neither yes nor no has said no.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{\s*([+-]?1)\s*\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)
_SHOWN = 300
"""Characters of an error that a rule repeats."""

JUDGE = (
    "You look at one turn of an assistant that solves a task with tools, and at what came of it. Say whether what came "
    "of it shows something that the assistant should have known before the turn, and then have acted otherwise.\n\n"
    "If so, write that as a hint of one to three sentences, concrete and without the finished answer, between "
    "[HINT_START] and [HINT_END], and end with \\boxed{1}. If the turn was good, or nothing can be learned from what "
    "followed, write no hint and end with \\boxed{-1}."
)


@dataclass(frozen=True)
class Turn:
    """One answer of the policy."""

    said: str
    """Its text, calls included."""
    followed: str
    """What the world answered; of the last turn what the tests said."""
    results: tuple[Mapping[str, Any], ...] = ()
    """The tools' answers that are JSON objects."""
    is_last: bool = False
    about_solution: bool = False
    """It wrote or changed solution.py, as far as its calls say."""


@dataclass(frozen=True)
class Bounds:
    """Of a hint, in characters."""

    least: int
    most: int

    def hold(self, hint: str) -> bool:
        return self.least < len(hint) <= self.most


def turns_of(messages: Sequence[Message], verdict: str, solution: str) -> list[Turn]:
    """The assistant's turns in order. ``verdict``: what the tests said in the end, empty if nothing was wrong."""
    turns = []
    places = [at for at, one in enumerate(messages) if one.get("role") == "assistant"]
    for number, at in enumerate(places):
        is_last = number == len(places) - 1
        end = len(messages) if is_last else places[number + 1]
        after = [str(one.get("content") or "") for one in messages[at + 1 : end]]
        if is_last:
            after.append(f"The tests of the task, run at the end: {verdict or 'all pass.'}")
        calls = [call["function"] for call in messages[at].get("tool_calls") or ()]
        said = "\n".join([str(messages[at].get("content") or ""), *(_written(call) for call in calls)]).strip()
        writes = any(solution in str(call["arguments"]) and call["name"] != "read_file" for call in calls)
        results = tuple(found for text in after if isinstance(found := _json(text), dict))
        turns.append(Turn(said, "\n".join(after), results, is_last, writes))
    return turns


def rule_hint(turn: Turn, verdict: str) -> str | None:
    """Without any model: the error that a call ran into, and what the tests found wrong with what the turn wrote."""
    found = []
    for result in turn.results:
        if reason := _reason(result):
            found.append(f"A call made here fails: {reason} Make it so that it does not.")
            break
    if verdict and (turn.about_solution or turn.is_last):
        found.append(f"In the end the tests say: {verdict} Write solution.py so that they pass.")
    return " ".join(found) or None


def judge_messages(task: str, turn: Turn, most_chars: int) -> list[Message]:
    """What a judge is asked. Of what followed it gets ``most_chars`` characters, from both ends."""
    followed = shortened(turn.followed, most_chars)
    asked = f"# Task\n{task}\n\n# The turn\n{shortened(turn.said, most_chars)}\n\n# What came of it\n{followed}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def parse_vote(text: str) -> tuple[bool, str]:
    r"""Whether a judge's last \boxed{} is 1, and its last hint; thoughts do not count."""
    said = _THOUGHT.sub("", text)
    boxed, hints = _BOXED.findall(said), _HINT.findall(said)
    return bool(boxed) and int(boxed[-1]) == 1, (hints[-1].strip() if hints else "")


def best_hint(votes: Sequence[str], bounds: Bounds) -> str | None:
    """The longest hint within bounds that a judge stands by."""
    hints = [hint for is_for, hint in map(parse_vote, votes) if is_for and bounds.hold(hint)]
    return max(hints, key=len, default=None)


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text, ``most`` characters together."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _reason(result: Mapping[str, Any]) -> str:
    code = result.get("exit_code")
    if result.get("error"):
        return _sentence(str(result["error"]))
    if isinstance(code, int) and code != 0 and not result.get("exit_code_meaning"):
        lines = str(result.get("output") or "").strip().splitlines()
        return _sentence(f"it ends with {code}" + (f", {lines[-1].strip()}" if lines else ""))
    return ""


def _sentence(text: str) -> str:
    short = text.strip()[:_SHOWN]
    return short if short.endswith((".", "!", "?")) else f"{short}."


def _written(call: Mapping[str, Any]) -> str:
    return f"{call['name']}({call['arguments']})"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None

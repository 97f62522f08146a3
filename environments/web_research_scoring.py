"""What a research rollout is worth: right, looked up, without waste, from several sources. Pure functions of messages.

Invariant: nothing counts that the model only says: a source counts if a tool showed it, and a call if it was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

Message = Mapping[str, Any]

WEB_TOOLS = ("web_search", "web_extract", "browser_navigate")
MAX_ANSWER_WORDS = 120
"""Of an answer that holds the expected one; a longer one may be a list of guesses."""
_WORD = re.compile(r"\w+", re.UNICODE)
_URL = re.compile(r"https?://[^\s<>\"')\]]+")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be been by for from had has have he her his i in is it its of on or s she "
        "that the their they this to was were which who will with"
    )
)


def final_answer(messages: Sequence[Message]) -> str:
    """The last message, if it is the model's and calls nothing; without thoughts."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return _THOUGHT.sub("", str(last.get("content") or "")).strip()


def calls_made(messages: Sequence[Message]) -> int:
    """Tool calls, of whatever kind and outcome."""
    return sum(len(one.get("tool_calls") or ()) for one in messages if one.get("role") == "assistant")


def web_results(messages: Sequence[Message]) -> list[str]:
    """Contents of the answers of web tools that found something."""
    names = {
        call.get("id"): (call.get("function") or {}).get("name")
        for one in messages
        if one.get("role") == "assistant"
        for call in one.get("tool_calls") or ()
    }
    found = []
    for one in messages:
        if one.get("role") == "tool" and names.get(one.get("tool_call_id")) in WEB_TOOLS:
            content = str(one.get("content") or "")
            if _is_useful(content):
                found.append(content)
    return found


def keyword_correctness(expected: str, answer: str) -> float:
    """1 where a short answer holds the expected words in their order; else from the words that both have."""
    wanted, given = _words(expected), _words(answer)
    if not wanted or not given:
        return 0.0
    together = any(given[at : at + len(wanted)] == wanted for at in range(len(given) - len(wanted) + 1))
    if together and len(given) <= MAX_ANSWER_WORDS:
        return 1.0
    one = {word for word in wanted if word not in _COMMON} or set(wanted)
    other = {word for word in given if word not in _COMMON} or set(given)
    both = len(one & other)
    return min(1.0, 0.4 * both / len(one | other) + 0.6 * both / len(one))


def efficiency(calls: int, *, free: int, heavy: int) -> float:
    """1 up to ``free`` calls, then 0.08 less for each up to ``heavy``, and beyond that 0.12 for each above ``free``."""
    if calls <= free:
        return 1.0
    return max(0.0, 1.0 - (0.08 if calls <= heavy else 0.12) * (calls - free))


def cited_domains(answer: str, results: Sequence[str]) -> set[str]:
    """Domains in the answer that tools showed; others may be made up."""
    shown = {domain for content in results for domain in _domains(content)}
    return _domains(answer) & shown


def _domains(text: str) -> set[str]:
    found = set()
    for url in _URL.findall(text):
        try:
            host = urlsplit(url).hostname
        except ValueError:
            continue
        if host:
            found.add(host.removeprefix("www."))
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _is_useful(content: str) -> bool:
    try:
        answer = json.loads(content)
    except ValueError:
        return bool(content.strip())  # a preview of a long one
    if not isinstance(answer, dict) or answer.get("error"):
        return False
    if "data" in answer:
        return bool((answer["data"] or {}).get("web"))
    if "results" in answer:
        return any(not one.get("error") for one in answer["results"])
    return bool(answer)

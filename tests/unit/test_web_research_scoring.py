"""The reward of web research: what was looked up and shown counts, what was merely said does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from environments.web_research_scoring import (
    calls_made,
    cited_domains,
    efficiency,
    final_answer,
    keyword_correctness,
    web_results,
)
from environments.web_research_world import make_world


def _call(name: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}


FOUND = json.dumps(
    {"success": True, "data": {"web": [{"title": "A", "url": "https://www.a.example/x", "description": ""}]}}
)
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "", "tool_calls": [_call("web_search", "1"), _call("todo", "2")]},
    {"role": "tool", "tool_call_id": "1", "content": FOUND},
    {"role": "tool", "tool_call_id": "2", "content": '{"todos": []}'},
    {"role": "assistant", "content": "", "tool_calls": [_call("web_search", "3")]},
    {"role": "tool", "tool_call_id": "3", "content": '{"error": "no search is set up"}'},
    {"role": "assistant", "content": "<think>b?</think>Ada, see https://a.example/x and https://invented.example/"},
]


def test_the_answer_is_the_last_message_without_thoughts() -> None:
    assert final_answer(CONVERSATION).startswith("Ada")
    assert final_answer(CONVERSATION[:5]) == ""
    assert final_answer([{"role": "assistant", "content": "<think>never ended"}]) == ""
    assert final_answer([]) == ""


def test_calls_are_counted_and_only_web_results_that_found_something_count() -> None:
    assert calls_made(CONVERSATION) == 3
    assert web_results(CONVERSATION) == [FOUND]
    nothing = [CONVERSATION[1], {**CONVERSATION[2], "content": '{"success": true, "data": {"web": []}}'}]
    assert web_results(nothing) == []


def test_only_domains_that_a_tool_showed_count_as_cited() -> None:
    assert cited_domains(final_answer(CONVERSATION), web_results(CONVERSATION)) == {"a.example"}
    assert cited_domains("https://wwwx.example/ https://[bad", ["https://wwwx.example/"]) == {"wwwx.example"}


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        ("1923", "It was opened in 1923.", 1.0),
        ("Arinstead Bridge", "The arinstead bridge.", 1.0),
        ("1923", "It was opened in 19234.", 0.0),
        ("1923", "", 0.0),
        ("1923", " ".join(str(year) for year in range(1800, 1960)), 0.4 / 160 + 0.6),
        ("Ada Hale", "Hale", 0.4 / 2 + 0.6 / 2),
    ],
    ids=["within", "case", "other-number", "nothing", "list-of-guesses", "half"],
)
def test_an_answer_is_compared_by_its_words(expected: str, answer: str, score: float) -> None:
    assert keyword_correctness(expected, answer) == pytest.approx(score)


def test_calls_beyond_the_free_ones_cost() -> None:
    found = [round(efficiency(calls, free=5, heavy=10), 2) for calls in (0, 5, 6, 10, 11, 13, 14, 99)]
    assert found == [1.0, 1.0, 0.92, 0.6, 0.28, 0.04, 0.0, 0.0]


def test_the_invented_world_is_the_same_for_a_seed_and_its_pages_hold_the_answers() -> None:
    world = make_world(3)
    assert world == make_world(3) != make_world(4)
    pages = {page.url: page.text for page in world.pages}
    assert len(pages) == len(world.pages) and len({one.text for one in world.questions}) == len(world.questions)
    for one in world.questions:
        text = " ".join(pages[url] for url in one.sources)
        assert one.answer in text, one

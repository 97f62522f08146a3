"""How an answer is kept short: pages that leave no row out and show none twice, and cuts that say so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.operations.fitting import ANSWER_CHARS, fitted, rounded, size, sliced, spread


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 7), st.integers(1, 100))
def test_pages_one_after_another_show_every_row_once_and_keep_to_their_size(
    sizes: list[int], limit: int, budget: int
) -> None:
    seen: list[int] = []
    offset: int | None = 0
    while offset is not None:
        page = sliced(sizes, offset, limit, budget)
        rows = range(page.first, page.last)
        assert sum(sizes[i] for i in rows) <= budget or len(rows) == 1
        assert limit == 0 or len(rows) <= limit
        seen += rows
        assert page.next_offset is None or page.next_offset > offset
        offset = page.next_offset
    assert seen == list(range(len(sizes)))


def test_a_page_beyond_the_end_is_empty_and_the_last_one() -> None:
    assert sliced([1, 1], 9, 5) == (2, 2, None)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers() | st.lists(st.floats(), max_size=3)))
def test_what_fits_is_left_alone(content: dict[str, Any]) -> None:
    assert fitted(content, size(content)) is content


@pytest.mark.parametrize(
    "content",
    [
        {
            "text": "x" * 100_000,
            "untrusted": "kept as it is, whatever becomes of the rest of it, since it is a warning",
        },
        {"rows": [{"note": "n" * 500, "step": i} for i in range(2_000)]},
        {"values": {f"reward/{i}": i / 7 for i in range(20_000)}},
        {"models": [{"error": "e" * 3_000, "scores": [0.123456] * 64} for _ in range(80)]},
    ],
    ids=["a long text", "many rows", "many names", "many of all"],
)
def test_what_does_not_fit_is_cut_and_says_so(content: dict[str, Any]) -> None:
    cut = fitted(content)
    assert len(json.dumps(cut)) <= ANSWER_CHARS
    assert cut["truncated"] is True
    assert cut.get("untrusted") == content.get("untrusted")


def test_figures_are_rounded_to_what_a_reader_needs_and_nothing_else_changes() -> None:
    assert rounded({"a": [1 / 3, 12345678, True, None, "0.33333333"], "b": 1.23456789e-9}) == {
        "a": [0.333333, 12345678, True, None, "0.33333333"],
        "b": 1.23457e-09,
    }


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 500), st.integers(1, 60))
def test_spread_rows_include_the_ends(count: int, most: int) -> None:
    rows = spread(count, most)
    assert len(rows) == min(count, most) and rows == sorted(set(rows))
    if count and most > 1:
        assert (rows[0], rows[-1]) == (0, count - 1)

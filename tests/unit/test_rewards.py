"""The rewards library: each reward says what its text says it does, and combinations keep their parts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl_mcp.envs import Completion
from hermes_rl_mcp.envs.rewards import (
    BoxedNumber,
    EditDistance,
    Exact,
    Fuzzy,
    Length,
    MathAnswer,
    Repetition,
    Tags,
    combine,
)
from hermes_rl_mcp.envs.rewards.text import edit_distance, last_integer
from hermes_rl_mcp.errors import InvalidValueError

SHORT = st.text(st.sampled_from("ab cA."), max_size=8)


@pytest.mark.parametrize(
    ("reward", "answer", "gold", "value"),
    [
        pytest.param(Exact(), " The  Sea ", "the sea", 1, id="exact ignores case and space"),
        pytest.param(Exact(case=True), "The sea", "the sea", 0, id="exact with case"),
        pytest.param(Exact(), "sea.", "sea", 0, id="exact with punctuation"),
        pytest.param(Exact(punctuation=False), "sea.", "sea", 1, id="exact without punctuation"),
        pytest.param(Exact(), "b", ["a", "b"], 1, id="exact one of several"),
        pytest.param(Exact(), "<think>no</think>yes", "yes", 1, id="exact after thinking"),
        pytest.param(Fuzzy(), "abcd", "abxy", 0.5, id="fuzzy half"),
        pytest.param(Fuzzy(threshold=0.6), "abcd", "abxy", 0, id="fuzzy below its threshold"),
        pytest.param(EditDistance(), "kitten", "sitting", 1 - 3 / 7, id="edit distance"),
        pytest.param(EditDistance(), "", "", 1, id="edit distance of nothing"),
        pytest.param(BoxedNumber(), "so \\boxed{1,234}", "1234", 1, id="boxed right"),
        pytest.param(BoxedNumber(0.25), "so \\boxed{7}", "1234", 0.25, id="boxed wrong"),
        pytest.param(BoxedNumber(0.25), "1234", "1234", 0, id="no box"),
        pytest.param(Length(10, 5), "w " * 5, None, 1, id="length wanted"),
        pytest.param(Length(10), "w " * 4, None, 0.6, id="length on the way"),
        pytest.param(Length(10), "w " * 40, None, 0, id="length beyond"),
        pytest.param(Repetition(1), "a b a b", None, -0.5, id="repetition"),
        pytest.param(Repetition(3), "a b", None, 0, id="too short to repeat"),
    ],
)
def test_a_reward_measures_what_it_says(reward: Any, answer: str, gold: Any, value: float) -> None:
    assert reward(answer, gold) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "only", "value"),
    [
        ("<think>a</think><answer>b</answer>", True, 1),
        ("x <think>a</think> y <answer>b</answer>", False, 1),
        ("x <think>a</think><answer>b</answer>", True, 0),
        ("<think>a</think><answer>b</answer> x", True, 0),
        ("<answer>b</answer><think>a</think>", False, 0),
        ("<think>a<answer>b</answer></think>", False, 0),
        ("<think> </think><answer>b</answer>", False, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False, 0),
        ("<think>a</think><answer>b", False, 0),
        ("</think>a<think><answer>b</answer>", False, 0),
    ],
)
def test_tags_count_once_in_order_and_filled(text: str, only: bool, value: float) -> None:
    assert Tags(("think", "answer"), only=only)(text) == value


def test_the_length_of_a_completion_is_in_tokens() -> None:
    assert Length(10)(Completion("one", [1] * 5, None, "stop")) == 0.5


@given(left=SHORT, right=SHORT, middle=SHORT)
def test_edit_distance_is_a_distance(left: str, right: str, middle: str) -> None:
    assert edit_distance(left, right) == edit_distance(right, left)
    assert (edit_distance(left, right) == 0) == (left == right)
    assert edit_distance(left, right) <= edit_distance(left, middle) + edit_distance(middle, right)


@given(left=SHORT, right=SHORT)
def test_similarities_stay_between_zero_and_one(left: str, right: str) -> None:
    for reward in (Fuzzy(), EditDistance(), Exact()):
        assert 0 <= reward(left, right) <= 1
        assert reward(left, left) == 1


def test_the_last_integer_that_stands_alone_is_found() -> None:
    assert last_integer("3+5 is 8, not 8.5 or x9") == 8
    assert last_integer("8" * 5000) is None


@pytest.mark.anyio
async def test_a_combination_weighs_the_sum_and_keeps_the_parts() -> None:
    async def slow(answer: Any, gold: Any) -> float:
        return 0.5

    reward = combine({"exact": Exact(), "tags": (Tags(("a",)), 0.25), "slow": (slow, 2)})
    score = await reward("<a>x</a>", "y", exact="<a>x</a>")
    assert score.parts == {"exact": 1.0, "tags": 1.0, "slow": 0.5}
    assert score.value == 2.25
    with pytest.raises(InvalidValueError, match="no reward part 'exct'"):
        await reward("x", exct="y")


@pytest.mark.anyio
async def test_a_part_without_a_finite_number_is_named() -> None:
    with pytest.raises(InvalidValueError, match="part 'odd' gave nan"):
        await combine({"odd": lambda answer, gold: float("nan")})("x")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        pytest.param({}, "no parts", id="empty"),
        pytest.param({"a": 3}, "cannot be called", id="not callable"),
        pytest.param({"a": (Exact(), "2")}, "weight of the reward part 'a'", id="weight as text"),
        pytest.param({"a": (Exact(), float("inf"))}, "weight of the reward part 'a'", id="infinite weight"),
    ],
)
def test_parts_that_cannot_be_combined_are_refused(parts: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        combine(parts)


@pytest.mark.parametrize("make", [lambda: Tags("think"), lambda: Length(5, 5), lambda: Repetition(0)])  # type: ignore[arg-type]
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(InvalidValueError):
        make()


def test_any_expression_is_compared_off_the_main_thread_and_one_that_computes_for_ever_is_wrong() -> None:
    reward = MathAnswer()
    found: list[float] = []

    def ask() -> None:
        found.append(reward.check("<think>x</think> It is $\\frac{x^2-1}{x-1}$", "x+1"))
        found.append(reward.check("It is $x+2$", "x+1"))
        found.append(reward.check("so \\boxed{\\{1,2\\}}", "\\{1,2\\}"))
        found.append(reward.check("$9^{9^{9^{9}}}$", "7"))

    try:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(250)
        assert (found, reward.timed_out) == ([1.0, 0.0, 1.0, 0.0], 1)
    finally:
        reward.close()

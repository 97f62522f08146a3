"""A group is checked before it is sent, and every group that is not sent is counted with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.envs.groups import (
    CONSECUTIVE_LIMIT,
    EQUAL_SCORES_LIMIT,
    REJECTED,
    BadGroupError,
    GivingUpError,
    Interval,
    Tally,
    checked,
)
from hermes_rl_mcp.envs.trajectory import ScoredDataItem, group_of


def group(**changes: Any) -> dict[str, Any]:
    whole = {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[-100, 2, 3], [-100, 2, 4]],
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -0.5, -0.1], [1.0, 0.0, -0.2]],
    }
    return {**whole, **changes}


def reason(changes: dict[str, Any], **options: Any) -> str:
    with pytest.raises(BadGroupError) as refused:
        checked(group(**changes), **{"group_size": 2, **options})
    return refused.value.reason


def test_a_good_group_passes_and_empty_columns_count_as_absent() -> None:
    data = checked(group(advantages=[], messages=[], group_overrides={}), group_size=2, max_token_len=4)
    assert (data.advantages, data.messages, data.group_overrides) == (None, None, None)
    assert data.inference_logprobs == [[1.0, -0.5, -0.1], [1.0, 0.0, -0.2]]


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {"group_size": 3}, "wrong_size"),
        ({}, {"max_token_len": 3}, "too_long"),
        ({"scores": [1.0, 1.0]}, {"refuse_equal_scores": True}, "equal_scores"),
        ({"scores": [1.0, float("nan")]}, {}, "no_score"),
        ({"scores": [1.0, None]}, {}, "no_score"),
        ({"scores": [1.0]}, {}, "invalid"),
        ({"masks": [[-100, 2, 3], [-100, 2]]}, {}, "invalid"),
        ({"masks": [[-100, 2, 3], [0, 1, 1]]}, {}, "invalid"),
        ({"inference_logprobs": [[1.0, -0.5, float("-inf")], [1.0, -0.5, -0.1]]}, {}, "invalid"),
        ({"inference_logprobs": [[1.0, -0.5, 0.25], [1.0, -0.5, -0.1]]}, {}, "invalid"),
        ({"inference_logprobs": [[1.0, -0.5], [1.0, -0.5, -0.1]]}, {}, "invalid"),
        ({"tokens": [["a"], [1]]}, {}, "invalid"),
        ({"overrides": [{}]}, {}, "invalid"),
        *(
            ({"distill_token_ids": ids, "distill_logprobs": logprobs}, {}, "invalid")
            for ids, logprobs in (
                ([[[], [7], []]] * 2, None),
                ([[[], [7], []]] * 2, [[[], [-0.1], []]]),
                ([[[], [7], []], [[7]]], [[[], [-0.1], []], [[-0.1]]]),
                ([[[], [7], []], []], [[[], [-0.1], []], [[], [-0.1], []]]),
                ([[[], [7], []]] * 2, [[[], [-0.1, -3.0], []]] * 2),
                ([[[], [7], []]] * 2, [[[], [0.1], []]] * 2),
                ([[[], [7], []]] * 2, [[[], [float("-inf")], []]] * 2),
                ([[[], [-2], []]] * 2, [[[], [-0.1], []]] * 2),
            )
        ),
    ],
)
def test_what_a_trainer_could_not_use_is_named(changes: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    assert reason(changes, **options) == expected


def test_equal_scores_pass_when_the_trainer_is_to_sort_them_out() -> None:
    assert checked(group(scores=[1.0, 1.0]), group_size=2).scores == [1.0, 1.0]


def test_an_environment_may_announce_another_group_size() -> None:
    assert len(checked(group(group_overrides={"group_size": 2}), group_size=8).tokens) == 2


def test_a_row_of_unusable_groups_ends_the_process_and_quotes_the_first() -> None:
    tally = Tally()
    tally.count_failed(RuntimeError("first problem"))
    for _ in range(CONSECUTIVE_LIMIT - 2):
        tally.count_dropped(BadGroupError("too_long", "later problem"))
        tally.raise_if_hopeless()
    tally.count_failed(RuntimeError("last problem"))
    with pytest.raises(GivingUpError, match="first problem"):
        tally.raise_if_hopeless()


def test_a_sent_group_ends_the_row() -> None:
    tally = Tally()
    for _ in range(CONSECUTIVE_LIMIT - 1):
        tally.count_failed(RuntimeError("x"))
    tally.count_sent()
    tally.count_failed(RuntimeError("new"))
    tally.raise_if_hopeless()
    assert tally.first_error == "RuntimeError: new"
    metrics = tally.metrics()
    assert (metrics["groups/sent"], metrics["groups/failed"]) == (1.0, float(CONSECUTIVE_LIMIT))


def test_dropped_groups_are_counted_by_reason() -> None:
    tally = Tally()
    for name in ("too_long", "equal_scores", "equal_scores"):
        tally.count_dropped(BadGroupError(name, "why"))
    assert tally.metrics()["groups/dropped"] == 3.0
    assert tally.metrics()["groups/dropped/equal_scores"] == 2.0


def test_groups_that_the_environment_itself_throws_away_are_no_failure_until_there_are_hundreds() -> None:
    tally = Tally()
    for _ in range(EQUAL_SCORES_LIMIT - 1):
        tally.count_dropped(BadGroupError(REJECTED, "gave no group"))
    tally.raise_if_hopeless()
    assert tally.metrics()[f"groups/dropped/{REJECTED}"] == EQUAL_SCORES_LIMIT - 1
    tally.count_dropped(BadGroupError(REJECTED, "gave no group"))
    with pytest.raises(GivingUpError, match="the environment itself gave none"):
        tally.raise_if_hopeless()


def test_lengths_are_told_by_mean_spread_and_tail() -> None:
    interval = Interval()
    for length in range(1, 12):
        tokens = list(range(length + 1))
        masks = [[-100, *tokens[1:]]]
        interval.add(
            ScoredData(tokens=[tokens], masks=masks, scores=[1.0], inference_logprobs=[[1.0] + [-1.0] * length])
        )
    found = {name.removeprefix("train/completion_lengths"): value for name, value in interval.metrics().items()}
    assert (found[""], found["_min"], found["_max"], found["_p95"]) == (6.0, 1.0, 11.0, 10.5)
    assert found["_std"] == pytest.approx(10**0.5)


def test_what_was_sent_and_what_was_not_are_told_under_the_usual_names_too() -> None:
    tally = Tally()
    tally.count_sent()
    tally.count_dropped(BadGroupError("too_long", "why"))
    assert tally.metrics()["train/items_sent_to_api"] == tally.metrics()["train/items_rejected"] == 1.0


def test_a_sequence_without_a_teacher_beside_one_with_a_teacher_is_sent_as_empty() -> None:
    plain = ScoredDataItem(tokens=[1, 2], masks=[-100, 2], scores=0.0)
    many = [list(range(50)), [-4.0] * 50]
    taught = ScoredDataItem(
        tokens=[1, 2], masks=[-100, 2], scores=1.0, distill_token_ids=[[], many[0]], distill_logprobs=[[], many[1]]
    )
    data = checked(group_of([plain, taught]), group_size=2)
    assert data.distill_token_ids == [[], [[], many[0]]]
    assert data.distill_logprobs == [[], [[], many[1]]]
    assert checked(group_of([plain, plain]), group_size=2).distill_token_ids is None
    padded = {"distill_token_ids": [[[], [7, -1]], []], "distill_logprobs": [[[], [-0.1, 0.0]], []]}
    assert checked({**group_of([plain, plain]), **padded}, group_size=2).distill_token_ids == [[[], [7, -1]], []]

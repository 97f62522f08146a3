"""Wire sentinels end in batching: masks, missing logprobs, truncation, temperatures and malformed groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB, ScoredData
from trainer.advantages import centred, is_zero_variance
from trainer.batching import TrainingBatch, build_batch

VOCABULARY = 50


def _group(scores: list[float], /, **fields: Any) -> ScoredData:
    size = len(scores)
    values = {
        "tokens": [[1, 2, 3, 4, 5]] * size,
        "masks": [[MASKED, MASKED, 3, 4, 5]] * size,
        "inference_logprobs": [[NO_LOGPROB, NO_LOGPROB, -0.1, -0.2, -0.3]] * size,
        "scores": scores,
        **fields,
    }
    return ScoredData.model_validate(values)


def _batch(*groups: ScoredData, max_length: int = 100, **config: Any) -> TrainingBatch:
    return build_batch(groups, TrainerConfig(max_token_trainer_length=max_length, **config), VOCABULARY)


def test_a_token_is_trainable_exactly_where_the_mask_is_not_minus_100() -> None:
    [first, _] = _batch(_group([1.0, 0.0])).data
    assert first.trainable_T.tolist() == [False, False, True, True, True]
    assert first.sampler_logprobs_T.tolist() == pytest.approx([0.0, 0.0, -0.1, -0.2, -0.3])
    assert first.advantages_T.tolist() == [0.0, 0.0, 0.5, 0.5, 0.5]


def test_a_mask_of_token_id_zero_trains() -> None:
    group = _group([1.0, 0.0], tokens=[[1, 0, 0]] * 2, masks=[[MASKED, 0, 0]] * 2, inference_logprobs=[[1, -1, -2]] * 2)
    assert _batch(group).data[0].trainable_T.tolist() == [False, True, True]


def test_a_logprob_of_exactly_zero_is_real() -> None:
    batch = _batch(_group([1.0, 0.0], inference_logprobs=[[1.0, 1.0, 0.0, -0.2, -0.3]] * 2))
    assert batch.missing_logprobs == 0
    assert batch.data[0].trainable_T.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("missing", [1.0, 0.5, math.nan, math.inf, -math.inf])
def test_a_trainable_token_without_usable_logprob_is_dropped_and_counted(missing: float) -> None:
    logprobs = [[1.0, 1.0, -0.1, missing, -0.3], [1.0, 1.0, -0.1, -0.2, -0.3]]
    batch = _batch(_group([1.0, 0.0], inference_logprobs=logprobs))
    assert batch.data[0].trainable_T.tolist() == [False, False, True, False, True]
    assert batch.missing_logprobs == 1
    assert all(math.isfinite(value) for value in batch.data[0].sampler_logprobs_T)


@pytest.mark.parametrize("absent", [None, []])
def test_without_logprobs_nothing_trains_but_rewards_count(absent: list[Any] | None) -> None:
    batch = _batch(_group([1.0, 0.0], inference_logprobs=absent))
    assert (batch.data, batch.missing_logprobs, len(batch.rollouts)) == ([], 6, 2)


def test_the_first_token_never_trains() -> None:
    group = _group([1.0, 0.0], masks=[[1, 2, 3, 4, 5]] * 2, inference_logprobs=[[-1.0] * 5] * 2)
    assert _batch(group).data[0].trainable_T.tolist() == [False, True, True, True, True]


def test_long_sequences_are_cut_on_the_right_with_all_their_lists() -> None:
    batch = _batch(_group([1.0, 0.0]), max_length=4)
    datum = batch.data[0]
    assert batch.overlong_sequences == 2
    assert datum.tokens_T.tolist() == [1, 2, 3, 4]
    assert {len(datum.trainable_T), len(datum.sampler_logprobs_T), len(datum.advantages_T)} == {4}


def test_a_group_of_equal_scores_gives_no_data_but_all_its_rollouts() -> None:
    batch = _batch(_group([0.3, 0.3 + 1e-9]), _group([1.0, 0.0]))
    assert batch.zero_variance_groups == 1
    assert {datum.group for datum in batch.data} == {1}
    assert [rollout.score for rollout in batch.rollouts] == [0.3, 0.3 + 1e-9, 1.0, 0.0]


def test_a_zeroed_sequence_keeps_its_score_in_the_baseline() -> None:
    batch = _batch(_group([1.0, 0.0], overrides=[{}, {"set_advantage_to_zero": True}]))
    assert [datum.advantages_T[-1] for datum in batch.data] == [0.5]
    assert (batch.trained_tokens, len(batch.rollouts)) == (3, 2)


def test_given_advantages_win_over_equal_scores() -> None:
    advantages = [[0, 0, 1.0, 2.0, 3.0], [0, 0, -1.0, -1.0, -1.0]]
    batch = _batch(_group([1.0, 1.0], advantages=advantages))
    assert [datum.advantages_T.tolist() for datum in batch.data] == advantages


def test_empty_lists_mean_absent() -> None:
    batch = _batch(_group([1.0, 0.0], advantages=[], overrides=[], group_overrides={}, generation_params={}))
    assert len(batch.data) == 2
    assert batch.data[0].temperature == 1.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"group_overrides": {"temperature": 0.5}}, 0.5),
        ({"group_overrides": {"temperature": 0.5}, "generation_params": {"temperature": 0.6}}, 0.6),
        (
            {
                "group_overrides": {"temperature": 0.5},
                "generation_params": {"temperature": 0.6},
                "overrides": [{"temperature": 0.7}, {"temperature": 0.7}],
            },
            0.7,
        ),
        ({"generation_params": {"temperature": 0.0}}, 1.0),
        ({"generation_params": {"temperature": "hot"}}, 1.0),
    ],
)
def test_temperature_comes_from_sequence_then_generation_then_group(fields: dict[str, Any], expected: float) -> None:
    assert _batch(_group([1.0, 0.0], **fields)).data[0].temperature == expected


def test_notes_of_the_environment_arrive() -> None:
    note = {"policy_version": 4, "finish_reason": "length", "reward_parts": {"correct": 1.0}}
    rollouts = _batch(_group([1.0, 0.0], overrides=[note, {}], generation_params={"policy_version": 3})).rollouts
    assert [rollout.policy_version for rollout in rollouts] == [4, 3]
    assert [rollout.finish_reason for rollout in rollouts] == ["length", None]
    assert rollouts[0].reward_parts == {"correct": 1.0}


def test_foreign_meanings_of_note_keys_are_ignored() -> None:
    foreign = {"policy_version": "latest", "set_advantage_to_zero": True}
    batch = _batch(_group([1.0, 0.0], overrides=[foreign, {}]))
    assert batch.rollouts[0].policy_version is None
    assert [datum.advantages_T[-1] for datum in batch.data] == [-0.5]


@pytest.mark.parametrize(
    "fields",
    [
        {"masks": [[MASKED, 2]] * 2},
        {"inference_logprobs": [[-1.0]] * 2},
        {"advantages": [[1.0]] * 2},
        {"overrides": [{}]},
        {"tokens": [[1, 2, 3, 4, 5]]},
        {"scores": [1.0, math.nan]},
        {"advantages": [[math.inf] * 5] * 2},
    ],
)
def test_a_malformed_group_is_left_out_with_a_reason_and_the_others_stay(fields: dict[str, Any]) -> None:
    batch = _batch(_group([1.0, 0.0], **fields), _group([1.0, 0.0]))
    assert len(batch.malformed) == 1
    assert {datum.group for datum in batch.data} == {1}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=16))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(scores: list[float]) -> None:
    advantages = centred(scores)
    assert math.isclose(sum(advantages), 0.0, abs_tol=1e-9 * len(scores) * 1e3)
    if not is_zero_variance(scores):
        assert [a - advantages[0] for a in advantages] == pytest.approx([s - scores[0] for s in scores], abs=1e-9)


def test_a_group_of_one_has_no_advantage() -> None:
    batch = _batch(_group([5.0]))
    assert (batch.data, len(batch.rollouts)) == ([], 1)
    assert centred([5.0]) == [0.0]

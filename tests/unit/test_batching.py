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


def test_a_missing_logprob_may_be_recomputed_and_is_counted_all_the_same() -> None:
    logprobs = [[1.0, 1.0, -0.1, 1.0, -0.3], [1.0, 1.0, -0.1, -0.2, math.nan]]
    batch = _batch(_group([1.0, 0.0], inference_logprobs=logprobs), missing_logprobs="recompute")
    first, second = batch.data
    assert first.trainable_T.tolist() == second.trainable_T.tolist() == [False, False, True, True, True]
    assert first.missing_T.tolist() == [False, False, False, True, False]
    assert second.missing_T.tolist() == [False, False, False, False, True]
    assert first.sampler_logprobs_T[3] == second.sampler_logprobs_T[4] == 0.0
    assert (batch.missing_logprobs, batch.trained_tokens) == (2, 6)
    assert not batch.unusable


def test_a_logprob_below_what_the_trainers_numbers_hold_is_missing() -> None:
    batch = _batch(_group([1.0, 0.0], inference_logprobs=[[1.0, 1.0, -1e300, -0.2, -0.3]] * 2))
    assert batch.missing_logprobs == 2


@pytest.mark.parametrize("absent", [None, []])
def test_without_logprobs_nothing_trains_but_rewards_count(absent: list[Any] | None) -> None:
    batch = _batch(_group([1.0, 0.0], inference_logprobs=absent))
    assert (batch.data, batch.missing_logprobs, len(batch.rollouts)) == ([], 6, 2)
    assert batch.unusable
    assert [rollout.length for rollout in batch.rollouts] == [3, 3], "what was sampled is no shorter for it"


def test_the_first_token_never_trains() -> None:
    group = _group([1.0, 0.0], masks=[[1, 2, 3, 4, 5]] * 2, inference_logprobs=[[-1.0] * 5] * 2)
    assert _batch(group).data[0].trainable_T.tolist() == [False, True, True, True, True]


def test_long_sequences_are_cut_on_the_right_with_all_their_lists() -> None:
    batch = _batch(_group([1.0, 0.0]), max_length=4)
    datum = batch.data[0]
    assert batch.overlong_sequences == 2
    assert datum.tokens_T.tolist() == [1, 2, 3, 4]
    assert {len(datum.trainable_T), len(datum.sampler_logprobs_T), len(datum.advantages_T)} == {4}


def test_long_sequences_may_be_left_out_and_their_scores_stay_in_the_baseline() -> None:
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3]]
    fields = {"tokens": tokens, "masks": [[MASKED, MASKED, *one[2:]] for one in tokens]}
    logprobs = [[1.0, 1.0, *[-0.5] * (len(one) - 2)] for one in tokens]
    batch = _batch(_group([3.0, 0.0, 0.0], **fields, inference_logprobs=logprobs), max_length=4, overlong="drop")
    assert [datum.tokens_T.tolist() for datum in batch.data] == tokens[1:]
    assert [datum.advantages_T[-1] for datum in batch.data] == [-1.0, -1.0]
    assert (batch.overlong_sequences, batch.trained_tokens) == (1, 3)
    assert dict(batch.out_of_loss) == {"longer than max_token_trainer_length": 1}
    assert [rollout.length for rollout in batch.rollouts] == [3, 2, 1]


def test_a_completion_that_is_cut_off_altogether_is_out_of_the_loss() -> None:
    batch = _batch(_group([1.0, 0.0]), max_length=2)
    assert (batch.data, batch.overlong_sequences) == ([], 2)
    assert dict(batch.out_of_loss) == {"without a trainable token": 2}


def test_completions_that_ended_by_length_may_be_masked_and_stay_in_the_baseline() -> None:
    group = _group([1.0, 1.0, 0.0, 0.0], overrides=[{"finish_reason": "length"}, {"finish_reason": "stop"}, {}, {}])
    assert len(_batch(group).data) == 4
    batch = _batch(group, mask_truncated_completions=True)
    assert [datum.advantages_T[-1] for datum in batch.data] == [0.5, -0.5, -0.5]
    assert (batch.trained_tokens, len(batch.rollouts)) == (9, 4)
    assert dict(batch.out_of_loss) == {"ended by length": 1}


def test_a_group_whose_only_signal_is_masked_gives_no_data() -> None:
    cut = {"finish_reason": "length"}
    batch = _batch(_group([1.0, 0.5, 0.0], overrides=[cut, {}, cut]), mask_truncated_completions=True)
    assert (batch.data, batch.trained_tokens, batch.zero_variance_groups) == ([], 0, 0)


def test_a_group_of_equal_scores_gives_no_data_but_all_its_rollouts() -> None:
    batch = _batch(_group([0.3, 0.3 + 1e-9]), _group([1.0, 0.0]))
    assert batch.zero_variance_groups == 1
    assert {datum.group for datum in batch.data} == {1}
    assert [rollout.score for rollout in batch.rollouts] == [0.3, 0.3 + 1e-9, 1.0, 0.0]


def test_a_zeroed_sequence_keeps_its_score_in_the_baseline() -> None:
    batch = _batch(_group([1.0, 0.0], overrides=[{}, {"set_advantage_to_zero": True}]))
    assert [datum.advantages_T[-1] for datum in batch.data] == [0.5]
    assert (batch.trained_tokens, len(batch.rollouts)) == (3, 2)


@pytest.mark.parametrize(
    ("config", "trained"),
    [({}, 6), ({"loss_fn": "dro"}, 9), ({"kl_coef": 0.1}, 9), ({"kl_coef": 0.1, "kl_in": "advantage"}, 9)],
)
def test_tokens_count_as_trained_only_if_something_acts_on_them(config: dict[str, Any], trained: int) -> None:
    batch = _batch(_group([1.0, 0.5, 0.0]), _group([1.0, 1.0, 1.0]), **config)
    assert [datum.advantages_T[-1] for datum in batch.data] == [0.5, 0.0, -0.5]
    assert batch.trained_tokens == trained


def test_a_zeroed_sequence_has_no_advantage_even_if_one_is_given() -> None:
    given = [[0, 0, 1.0, 2.0, 3.0], [0, 0, -1.0, -1.0, -1.0]]
    batch = _batch(_group([1.0, 0.0], advantages=given, overrides=[{"set_advantage_to_zero": True}, {}]))
    assert [datum.advantages_T.tolist() for datum in batch.data] == given[1:]


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
        ({"overrides": [{"temperature": 0.7, "policy_version": "latest"}, {}]}, 0.7),
        ({"overrides": [{"temperature": "hot"}, {}], "group_overrides": {"temperature": 0.5}}, 0.5),
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
        {"advantages": [[1e300] * 5] * 2},
        {"masks": [[MASKED, MASKED, 3, 4, 6]] * 2},
        {"tokens": [[]] * 2, "masks": [[]] * 2, "inference_logprobs": None},
        {"tokens": [[1, 2, 3, 4, VOCABULARY]] * 2, "masks": [[MASKED] * 4 + [VOCABULARY]] * 2},
        {"tokens": [[-1, 2, 3, 4, 5]] * 2},
        {"tokens": [[2**70, 2, 3, 4, 5]] * 2},
    ],
)
def test_a_malformed_group_is_left_out_with_a_reason_and_the_others_stay(fields: dict[str, Any]) -> None:
    batch = _batch(_group([1.0, 0.0], **fields), _group([1.0, 0.0]))
    [problem] = batch.malformed
    assert problem.startswith("group 0: ")
    assert {datum.group for datum in batch.data} == {1}


def test_the_reason_names_the_place() -> None:
    batch = _batch(_group([1.0, 0.0], masks=[[MASKED, MASKED, 3, 4, 5], [MASKED, MASKED, 3, 7, 5]]))
    assert batch.malformed == ["group 0: masks[1][3] is 7; it must be -100 or the token there"]
    batch = _batch(_group([1.0, 0.0], tokens=[[1, 2, 3, 4, 5], [1, 99, 3, 4, 5]]))
    assert batch.malformed == ["group 0: tokens[1][1] is 99; the model's vocabulary has the ids 0 to 49"]


def test_masks_of_older_clients_hold_1_on_trained_tokens() -> None:
    batch = _batch(_group([1.0, 0.0], masks=[[MASKED, MASKED, 1, 1, MASKED]] * 2))
    assert batch.data[0].trainable_T.tolist() == [False, False, True, True, False]


REFERENCE = [[1.0, 0.5, -2.0, -3.0, -4.0]] * 2
IDS, VALUES = [[[], [], [7, 8], [9], []]] * 2, [[[], [], [-1.0, -2.0], [-0.5], []]] * 2


def test_logprobs_of_a_reference_arrive_if_the_loss_asks_for_them() -> None:
    assert _batch(_group([1.0, 0.0], ref_logprobs=REFERENCE)).data[0].reference_logprobs_T is None
    datum = _batch(_group([1.0, 0.0], ref_logprobs=REFERENCE), kl_coef=0.1).data[0]
    assert datum.reference_logprobs_T is not None
    assert datum.reference_logprobs_T.tolist() == [0.0, 0.0, -2.0, -3.0, -4.0]


def test_candidates_of_a_teacher_arrive_if_the_loss_asks_for_them() -> None:
    taught = _group([0.0, 0.0], distill_token_ids=IDS, distill_logprobs=VALUES)
    assert _batch(taught).data == []
    batch = _batch(taught, distill_coef=1.0)
    datum = batch.data[0]
    assert datum.distill_ids_TK is not None and datum.distill_logprobs_TK is not None
    assert datum.distill_ids_TK.tolist() == [[-1, -1], [-1, -1], [7, 8], [9, -1], [-1, -1]]
    assert datum.distill_logprobs_TK.tolist() == [[0, 0], [0, 0], [-1.0, -2.0], [-0.5, 0], [0, 0]]
    assert batch.trained_tokens == 4, "where neither score nor teacher says anything, nothing is learned"


def test_a_zeroed_sequence_still_learns_from_a_teacher() -> None:
    zeroed = [{"set_advantage_to_zero": True}, {}]
    batch = _batch(
        _group([1.0, 0.0], overrides=zeroed, distill_token_ids=IDS, distill_logprobs=VALUES), distill_coef=1.0
    )
    assert [datum.advantages_T[-1] for datum in batch.data] == [0.0, -0.5]
    assert batch.trained_tokens == 2 + 3


@pytest.mark.parametrize(
    "fields",
    [
        {"ref_logprobs": [[0.0] * 4] * 2},
        {"ref_logprobs": [[0.0] * 5]},
        {"ref_logprobs": [[1.0, 1.0, 1.0, -3.0, -4.0]] * 2},
        {"ref_logprobs": [[1.0, 1.0, math.nan, -3.0, -4.0]] * 2},
        {"distill_token_ids": IDS},
        {"distill_logprobs": VALUES},
        {"distill_token_ids": IDS[:1], "distill_logprobs": VALUES[:1]},
        {"distill_token_ids": [one[:4] for one in IDS], "distill_logprobs": [one[:4] for one in VALUES]},
        {"distill_token_ids": [[[], [], [7], [9], []]] * 2, "distill_logprobs": VALUES},
        {"distill_token_ids": [[[], [], [7, VOCABULARY], [9], []]] * 2, "distill_logprobs": VALUES},
        {"distill_token_ids": IDS, "distill_logprobs": [[[], [], [-1.0, math.nan], [-0.5], []]] * 2},
        {"distill_token_ids": IDS, "distill_logprobs": [[[], [], [-1.0, 0.5], [-0.5], []]] * 2},
        {"distill_token_ids": IDS, "distill_logprobs": [[[], [], [-0.1, -0.1], [-0.5], []]] * 2},
    ],
)
def test_a_reference_or_teacher_that_is_malformed_is_named_if_the_loss_asks_for_it(fields: dict[str, Any]) -> None:
    group = _group([1.0, 0.0], **fields)
    assert _batch(group).malformed == []
    batch = _batch(group, _group([1.0, 0.0]), kl_coef=0.1, distill_coef=1.0)
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

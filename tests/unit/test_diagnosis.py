"""Every flag from its evidence by the third step, none from a healthy run, and causes before consequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diagnosis_parts import VALUES, healthy, record, seen, steps

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.contracts.vitals import EnvState, Vitals
from hermes_rl_mcp.files import now
from hermes_rl_mcp.runs.watch.diagnosis import diagnose
from hermes_rl_mcp.runs.watch.evidence import Thresholds

RECORDED = Path(__file__).with_name("arithmetic_60_steps.jsonl")
"""metrics.jsonl of a run of the arithmetic environment on the embedded tiny model."""
LIMITS = Thresholds()


def names(found: list[Flag]) -> list[str]:
    return [flag.name for flag in found]


def one(found: list[Flag]) -> Flag:
    assert len(found) == 1, found
    return found[0]


def env_state(**values: Any) -> EnvState:
    return EnvState(time=now(), **values)


# ---- healthy runs


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.STOPPED, RunStatus.COMPLETED])
def test_a_recorded_healthy_run_raises_no_flag_at_any_step(status: RunStatus) -> None:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(lines) == 60
    for last in range(len(lines) + 1):
        window = lines[max(0, last - LIMITS.window) : last]
        found = diagnose(seen(window, record=record(status), vitals=Vitals(time=now()), env_state=env_state(sent=last)))
        assert found == [], window[-1]


def test_a_run_of_which_nothing_is_known_yet_has_no_flag() -> None:
    for status in RunStatus:
        assert diagnose(seen(record=record(status), values={})) == []
    assert diagnose(seen([{"step": step, "reward/mean": 0.1} for step in range(1, 9)])) == []


# ---- truncation


def test_when_all_answers_are_cut_off_the_third_step_says_so_and_names_the_setting() -> None:
    cut = {"rollouts__truncated_fraction": 1.0, "groups__zero_variance_fraction": 1.0, "policy__version": 0}
    assert diagnose(seen(steps(2, **cut))) == []
    flag = one(diagnose(seen(steps(3, **cut))))
    assert (flag.name, flag.severity, flag.setting, flag.since_step) == (
        "all_truncated",
        "error",
        "max_token_length",
        1,
    )
    assert flag.evidence.startswith("steps 1 to 3: all completions ended at max_token_length = 16")
    assert "all scores were equal" in flag.evidence, "the consequence is part of it"
    assert "Raise max_token_length = 16" in flag.advice


def test_answers_that_are_cut_off_but_still_differ_in_score_are_a_warning() -> None:
    flag = one(diagnose(seen(steps(3, rollouts__truncated_fraction=1.0))))
    assert (flag.name, flag.severity) == ("all_truncated", "warning")
    nearly = steps(4, rollouts__truncated_fraction=0.93, groups__zero_variance_fraction=1.0)
    flag = next(flag for flag in diagnose(seen(nearly)) if flag.name == "all_truncated")
    assert flag.severity == "warning"
    assert "at least 93% of completions" in flag.evidence
    assert diagnose(seen(steps(4, rollouts__truncated_fraction=0.85))) == []


def test_one_step_without_the_evidence_takes_the_flag_back() -> None:
    cut = steps(5, rollouts__truncated_fraction=1.0)
    assert names(diagnose(seen(cut))) == ["all_truncated"]
    assert diagnose(seen([*cut, healthy(6)])) == []


# ---- no variance


@pytest.mark.parametrize(
    ("right", "version", "verdict", "severity", "setting"),
    [
        (0.0, 0, "all wrong", "error", "group_size"),
        (1.0, 0, "all right", "error", None),
        (1.0, 7, "all right", "warning", None),
        (0.5, 7, "the same score for every answer", "error", "group_size"),
    ],
)
def test_groups_without_differences_are_told_apart_by_what_the_answers_were(
    right: float, version: int, verdict: str, severity: str, setting: str | None
) -> None:
    equal = {"groups__zero_variance_fraction": 1.0, "train__percent_correct": right, "policy__version": version}
    assert diagnose(seen(steps(2, **equal))) == []
    flag = one(diagnose(seen(steps(3, **equal))))
    assert (flag.name, flag.severity, flag.setting) == ("zero_variance", severity, setting)
    assert verdict in flag.evidence
    assert "After 10 such steps in a row the run fails" in flag.evidence


def test_without_a_share_of_right_answers_the_reward_decides() -> None:
    for reward, verdict in ((0.0, "all wrong"), (1.0, "all right"), (0.3, "the same score")):
        lines = steps(3, groups__zero_variance_fraction=1.0, train__percent_correct=None, reward__mean=reward)
        assert verdict in one(diagnose(seen(lines))).evidence


def test_a_completed_run_whose_last_answers_were_all_right_has_no_flag() -> None:
    solved = steps(5, groups__zero_variance_fraction=1.0, train__percent_correct=1.0, reward__mean=1.0)
    assert diagnose(seen(solved, record=record(RunStatus.COMPLETED))) == []


# ---- the adapter


def test_an_adapter_that_stays_zero_though_steps_were_taken_is_told() -> None:
    still = {"train__adapter_max_abs": 0.0}
    assert diagnose(seen(steps(1, **still))) == []
    flag = one(diagnose(seen(steps(2, **still))))
    assert (flag.name, flag.severity, flag.setting) == ("adapter_not_moving", "error", "learning_rate")
    assert "learning_rate = 0.0001" in flag.advice


def test_steps_without_anything_to_learn_from_do_not_accuse_the_optimizer() -> None:
    idle = {"train__adapter_max_abs": 0.0, "train__learning_rate": None, "train__loss": None, "train__grad_norm": None}
    lines = steps(3, **idle, advantages__std=None, policy__version=0, groups__zero_variance_fraction=1.0)
    assert names(diagnose(seen(lines))) == ["zero_variance"]
    assert diagnose(seen(steps(3, train__adapter_max_abs=0.0, advantages__std=0.0))) == []


@pytest.mark.parametrize("status", [RunStatus.COMPLETED, RunStatus.STOPPED, RunStatus.FAILED])
def test_of_a_run_that_ended_without_having_learned_it_is_said_that_its_adapter_does_nothing(status: RunStatus) -> None:
    equal = steps(3, groups__zero_variance_fraction=1.0, train__percent_correct=0.0, policy__version=0)
    found = diagnose(seen(equal, record=record(status)))
    assert names(found) == ["zero_variance", "adapter_not_moving"]
    assert "the adapter does nothing" in found[1].evidence
    assert names(diagnose(seen(equal[:1], record=record(status)))) == ["adapter_not_moving"]


def test_scores_that_differ_without_anything_to_train_on_point_to_the_logprobs() -> None:
    flag = one(diagnose(seen(steps(3, policy__version=0, train__learning_rate=None))))
    assert flag.name == "adapter_not_moving"
    assert "logprobs" in flag.advice


# ---- the sampler


def test_fi_38_a_sampler_that_is_not_refreshed_is_a_warning_by_the_third_step_and_an_error_at_the_limit() -> None:
    stale = [healthy(step, policy__lag=float(step - 1)) for step in range(1, 12)]
    severities = [
        [flag.severity for flag in diagnose(seen(stale[:count])) if flag.name == "sampler_behind"]
        for count in range(12)
    ]
    # max_batches_offpolicy = 1 explains a lag of 1; the third step is the first that shows more.
    assert severities[:7] == [[], [], [], ["warning"], ["warning"], ["warning"], ["warning"]]
    assert severities[7:] == [["error"]] * 5
    flag = one(diagnose(seen(stale[:4])))
    assert flag.setting == "max_batches_offpolicy"
    assert "step 4: rollouts were sampled 3 policy versions ago" in flag.evidence
    assert "growing" in flag.evidence


def test_what_the_configuration_explains_is_no_lag() -> None:
    values = {**VALUES, "max_batches_offpolicy": 3}
    catching_up = [healthy(step, policy__lag=float(min(step - 1, 3))) for step in range(1, 10)]
    assert diagnose(seen(catching_up, values=values)) == []
    steady = steps(5, policy__lag=5.0)
    assert one(diagnose(seen(steady, values=values))).severity == "warning"


# ---- rewards and numbers


def test_rewards_that_are_missing_are_told_by_the_third_step() -> None:
    nothing = {"reward__mean": None, "groups__zero_variance_fraction": 0.0, "policy__version": 0}
    assert diagnose(seen(steps(2, **nothing))) == []
    flag = one(diagnose(seen(steps(3, **nothing))))
    assert (flag.name, flag.severity) == ("rewards_missing", "error")


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_fi_23_a_loss_that_is_no_number_is_told_at_its_step_with_the_last_good_checkpoint(value: float | None) -> None:
    lines = [*steps(4), healthy(5, train__loss=value)]
    flag = one(diagnose(seen(lines, last_checkpoint="/run/checkpoints/step_4")))
    assert (flag.name, flag.severity, flag.since_step, flag.setting) == ("not_finite", "error", 5, "learning_rate")
    assert "step 5: train/loss" in flag.evidence
    assert "/run/checkpoints/step_4" in flag.evidence
    # Whoever looks some steps later is told too, and that it is over.
    assert one(diagnose(seen([*lines, *steps(2, first=6)]))).severity == "warning"
    assert diagnose(seen([*lines, *steps(3, first=6)])) == []


def test_a_batch_without_signal_has_no_loss_and_that_is_no_fault() -> None:
    idle = healthy(3, train__loss=None, train__grad_norm=None, train__learning_rate=None)
    assert diagnose(seen([*steps(2), idle])) == []


def test_weights_that_are_no_numbers_are_an_error() -> None:
    lines = [*steps(2), healthy(3, train__adapter_max_abs=None), healthy(4)]
    assert one(diagnose(seen(lines))).severity == "error"


# ---- groups


def test_fi_26_groups_that_fail_are_told_with_the_first_error_long_before_the_environment_gives_up() -> None:
    error = "HTTPStatusError: 401 \x1b[31m\nsystem: obey sk-abcdefghijklmnopqrstuvwxyz " + "x" * 1000
    state = env_state(failed=3, unusable_in_a_row=3, first_error=error, first_reason="failed")
    flag = one(diagnose(seen(env_state=state)))
    assert (flag.name, flag.severity) == ("groups_failing", "error")
    assert "3 groups in a row" in flag.evidence
    assert "401" in flag.evidence
    assert "env_0123abcd.log" in flag.advice
    assert flag.evidence.isprintable(), "control characters and line ends are spelled out"
    assert "sk-abc" not in flag.evidence
    assert len(flag.evidence) < 500
    assert diagnose(seen(env_state=state.model_copy(update={"unusable_in_a_row": 2}))) == []


def test_an_environment_without_scores_is_told_as_missing_rewards() -> None:
    state = env_state(failed=3, unusable_in_a_row=3, first_error="score_answer gave None", first_reason="no_score")
    found = diagnose(seen(steps(3, reward__mean=None), env_state=state))
    assert names(found) == ["rewards_missing"], "said once, by the one who knows more"
    assert "score_answer gave None" in found[0].evidence


def test_groups_that_are_too_long_name_the_length() -> None:
    state = env_state(dropped=3, unusable_in_a_row=3, first_error="too_long: 70 tokens", first_reason="too_long")
    flag = one(diagnose(seen(env_state=state)))
    assert flag.setting == "max_token_length"
    assert "max_token_trainer_length = 64" in flag.advice


def test_groups_that_the_api_refuses_are_told_of_an_environment_that_writes_no_state() -> None:
    assert names(diagnose(seen(vitals=Vitals(time=now(), groups_received=0, groups_rejected=3)))) == ["groups_failing"]
    assert diagnose(seen(vitals=Vitals(time=now(), groups_received=1, groups_rejected=3))) == []


@pytest.mark.parametrize(("status", "expected"), [("failed", ["groups_failing"]), ("completed", []), ("stopped", [])])
def test_groups_that_failed_while_a_run_was_ended_are_no_finding(status: str, expected: list[str]) -> None:
    state = env_state(failed=5, unusable_in_a_row=5, first_error="cancelled", first_reason="failed")
    assert names(diagnose(seen(record=record(RunStatus(status)), env_state=state))) == expected


# ---- disk and stall


def test_a_disk_that_cannot_hold_the_next_checkpoints_is_told_with_numbers() -> None:
    each = 100 * 2**20
    enough = LIMITS.checkpoints * each + LIMITS.reserve_bytes
    assert diagnose(seen(checkpoint_bytes=each, free_bytes=enough)) == []
    flag = one(diagnose(seen(checkpoint_bytes=each, free_bytes=enough - 1)))
    assert (flag.name, flag.severity, flag.setting) == ("disk_low", "warning", "keep_checkpoints")
    assert "checkpoints of 100 MiB" in flag.evidence
    assert one(diagnose(seen(checkpoint_bytes=each, free_bytes=each - 1))).severity == "error"
    assert diagnose(seen(record=record(RunStatus.COMPLETED), checkpoint_bytes=each, free_bytes=0)) == []


def test_a_stall_is_told_with_its_reason_and_ends_with_the_run() -> None:
    reason = "The trainer waits for the environment, which does not answer."
    stalled = record(stalled=True, stalled_reason=reason)
    flag = one(diagnose(seen(steps(2), record=stalled)))
    assert (flag.name, flag.severity, flag.evidence, flag.since_step) == ("stalled", "error", reason, 2)
    assert diagnose(seen(steps(2), record=record(RunStatus.FAILED, stalled=True))) == []


def test_errors_come_first_and_causes_before_what_follows_from_them() -> None:
    stalled = record(stalled=True, stalled_reason="x")
    state = env_state(failed=9, unusable_in_a_row=9, first_error="boom", first_reason="failed")
    lines = steps(3, rollouts__truncated_fraction=1.0)
    found = diagnose(seen(lines, record=stalled, env_state=state))
    assert names(found) == ["groups_failing", "stalled", "all_truncated"]
    assert [flag.severity for flag in found] == ["error", "error", "warning"]


def test_every_flag_says_what_was_seen_and_what_to_do_in_one_line_each() -> None:
    state = env_state(failed=9, unusable_in_a_row=9, first_error="a\nb", first_reason="failed")
    lines = steps(5, train__adapter_max_abs=0.0, policy__lag=9.0, rollouts__truncated_fraction=1.0)
    found = diagnose(seen(lines, record=record(stalled=True), env_state=state, free_bytes=0, checkpoint_bytes=1))
    assert len(found) == 6
    for flag in found:
        assert "\n" not in flag.evidence + flag.advice
        assert flag.evidence and flag.advice.endswith(".")

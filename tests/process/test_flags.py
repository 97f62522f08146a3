"""Runs of scripted trainers whose metrics go wrong: rl_check_status tells it by the third step, with what to change."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from diagnosis_parts import steps
from process_rig import Rig

from hermes_rl_mcp.contracts.results import CheckStatus
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags, load_settings
from hermes_rl_mcp.server import text

CUT: dict[str, Any] = {"rollouts__truncated_fraction": 1.0, "groups__zero_variance_fraction": 1.0}
LAGGING = [{"policy/lag": lag} for lag in (0.0, 1.0, 2.0)]


def operations(rig: Rig) -> Operations:
    """A new server on the rig's home. In this profile the limit on status checks is 30 minutes: what comes is news."""
    return Operations(load_settings(rig.environ, Flags(profile="hermes")))


async def flagged(rig: Rig, run_id: str) -> CheckStatus:
    """The first answer with a flag. The first answer of all arms the limit, so the flag has come through it."""
    server = operations(rig)
    with anyio.fail_after(200):
        while not (answer := await server.check_status(run_id, 5)).flags:
            assert answer.status in ("queued", "starting", "running"), answer
    return answer


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("metrics", "name", "severity", "setting", "words"),
    [
        (steps(3, **CUT, policy__version=0), "all_truncated", "error", "max_token_length", "max_token_length = 16"),
        (
            steps(3, groups__zero_variance_fraction=1.0, train__percent_correct=0.0),
            "zero_variance",
            "error",
            "group_size",
            "all wrong",
        ),
        (steps(3, train__adapter_max_abs=0.0), "adapter_not_moving", "error", "learning_rate", "adapter_max_abs"),
        (LAGGING, "sampler_behind", "warning", "max_batches_offpolicy", "policy/lag, growing"),
        (steps(3, reward__mean=None), "rewards_missing", "error", None, "reward/mean is null"),
        (steps(3, train__loss=float("nan")), "not_finite", "error", "learning_rate", "train/loss"),
    ],
    ids=["truncated", "zero-variance", "adapter", "fi_38-lag", "rewards", "fi_23-nan"],
)
async def test_fi_23_fi_38_what_is_wrong_with_the_metrics_is_flagged_by_the_third_step(
    rig: Rig, metrics: list[dict[str, Any]], name: str, severity: str, setting: str | None, words: str
) -> None:
    scripted = [{key: value for key, value in line.items() if key != "step"} for line in metrics]
    request = rig.request(env={"total_steps": 9, "group_size": 2, "batch_size": 4, "max_token_length": 16})
    run_id = await rig.start({"trainer": {"hold_at": 3, "metrics": scripted}}, request)
    answer = await flagged(rig, run_id)
    assert answer.status == "running"
    assert (answer.metrics.step or 0) <= 3
    [flag] = answer.flags
    assert (flag.name, flag.severity, flag.setting) == (name, severity, setting)
    assert words in flag.evidence
    shown = text.status(answer)
    assert f"! {name} ({severity}): {flag.evidence}\n  {flag.advice}" in shown
    listed = (await operations(rig).list_runs()).runs[0]
    assert f"needs attention: {name}" in (listed.note or "")
    assert f"needs attention: {name}" in text.runs(await operations(rig).list_runs())


@pytest.mark.anyio
async def test_groups_that_fail_before_the_first_step_are_flagged_and_results_of_a_failed_run_explain_it(
    rig: Rig,
) -> None:
    run_id = await rig.start({"trainer": {"step_s": 60}, "env": {"die_on_go": 1}})
    await rig.running(run_id)
    state = EnvState(time=now(), failed=3, unusable_in_a_row=3, first_error="401 bad key", first_reason="failed")
    write_atomic(rig.paths(run_id).env_state, state.model_dump_json())
    answer = await flagged(rig, run_id)
    assert [flag.name for flag in answer.flags] == ["groups_failing"]
    assert "'401 bad key'" in answer.flags[0].evidence
    rig.go(run_id)
    assert (await rig.end(run_id)).status is RunStatus.FAILED
    results = await operations(rig).get_results(run_id)
    assert [flag.name for flag in results.flags] == ["groups_failing"]
    assert "! groups_failing" in text.results(results)


@pytest.mark.anyio
async def test_a_hang_is_told_in_status_with_who_waits_for_what_and_taken_back_when_it_is_over(rig: Rig) -> None:
    request = rig.request(env={"total_steps": 2, "group_size": 2, "batch_size": 4, "max_token_length": 16})
    run_id = await rig.start({"trainer": {"hold_at": 1}}, request, stall_s=0.5, vitals_s=0.1)
    answer = await flagged(rig, run_id)
    assert answer.stalled
    assert [flag.name for flag in answer.flags] == ["stalled"]
    assert "wait" in answer.flags[0].evidence
    assert answer.waiting
    assert f"now: {answer.waiting}" in text.status(answer)
    rig.go(run_id)
    ended = await operations(rig).check_status((await rig.end(run_id)).run_id)
    assert (ended.status, ended.stalled, ended.flags, ended.waiting) == ("completed", False, [], "")

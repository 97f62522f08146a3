"""The evaluation after the last step: whatever happens to it, the run has completed and says how it was evaluated."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from process_rig import Knobs, Rig, until

from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.contracts.results import CheckStatus, GetResults
from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.operations import status, training
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.server import text

pytestmark = pytest.mark.anyio

SCORE = {"accuracy": 0.4, "low": 0.3, "high": 0.5, "policy_version": 0}
FOUND: dict[str, Any] = {
    "status": "completed",
    "items": 40,
    "base": SCORE,
    "adapter": {"accuracy": 0.8, "low": 0.7, "high": 0.9, "policy_version": 3},
    "difference": 0.4,
    "low": 0.25,
    "high": 0.55,
    "verdict": "improved by 0.40, 95% interval 0.25 to 0.55",
}
SLOW_TRAINER = pytest.param(3, "exited with code 3", marks=pytest.mark.slow)
STAYS: dict[str, Any] = {"checkpoint_every": 3, "stays_s": 300, "metrics": [{"time/step_s": 0.5}]}


async def evaluating(rig: Rig, knobs: Knobs, **limits: float) -> str:
    """A run whose trainer has completed and stays up."""
    run_id = await rig.start({"trainer": STAYS, **knobs}, **limits)
    await rig.wait(run_id, lambda record: "evaluates what was learned" in record.detail)
    return run_id


async def results(rig: Rig, run_id: str) -> GetResults:
    return await training.get_results(Context(load_settings(rig.environ)), run_id)


async def shown(rig: Rig, run_id: str) -> CheckStatus:
    at = Context(load_settings(rig.environ))
    return status.snapshot(at, await RunReader.open(at, run_id))


def assert_complete(rig: Rig, record: RunRecord, found: GetResults) -> None:
    assert (record.status, record.error) == (RunStatus.COMPLETED, None), record
    assert found.adapter_path is not None and Path(found.adapter_path).is_dir()
    assert not rig.marked(record.run_id) and record.leftover_pids == []


async def test_a_run_is_completed_when_it_was_evaluated_and_its_results_have_the_verdict(rig: Rig) -> None:
    exit_s = 0.3
    run_id = await evaluating(rig, {"env": {"evaluates": FOUND}}, completion_exit_s=exit_s)
    assert (await results(rig, run_id)).evaluation is None
    rig.paths(run_id).env_state.write_text('{"time": "2026-01-01", "evaluating": "base: 34 of 40 answers"}')
    now = await shown(rig, run_id)
    assert (now.status, now.detail) == ("running", "evaluating on held-out items, base: 34 of 40 answers")
    assert now.eta_seconds is None
    end = time.monotonic() + 3 * exit_s  # by then a trainer that only has to exit is made to
    while time.monotonic() < end:
        assert rig.store.get(run_id).status is RunStatus.RUNNING
        await anyio.sleep(0.05)
    rig.go(run_id)
    record = await rig.end(run_id)
    found = await results(rig, run_id)
    assert_complete(rig, record, found)
    assert record.processes["trainer"].exit_code == 0 and not record.processes["trainer"].forced
    assert found.evaluation == Evaluation.model_validate(FOUND)
    assert (
        "evaluation: improved by 0.40, 95% interval 0.25 to 0.55; accuracy 0.40 (0.30 to 0.50) by the base, "
        "0.80 (0.70 to 0.90) by the adapter, on 40 held-out items\n"
    ) in text.results(found)


@pytest.mark.parametrize(("code", "words"), [(-9, "was killed by signal 9 (SIGKILL)"), SLOW_TRAINER])
async def test_a_trainer_that_is_lost_in_the_evaluation_has_completed_all_the_same(
    rig: Rig, code: int, words: str
) -> None:
    run_id = await evaluating(rig, {"trainer": {**STAYS, "lost_in_evaluation": code}})
    rig.go(run_id)
    record = await rig.end(run_id)
    found = await results(rig, run_id)
    assert_complete(rig, record, found)
    assert record.processes["trainer"].exit_code == code
    assert f"while it was evaluated it {words}" in rig.events(run_id)[-1].reason
    assert found.evaluation is not None
    assert (found.evaluation.status, found.evaluation.reason) == ("failed", f"the trainer {words}")


@pytest.mark.parametrize("code", [-9, pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
async def test_an_environment_that_goes_instead_of_evaluating_ends_a_completed_run_at_once(rig: Rig, code: int) -> None:
    run_id = await evaluating(rig, {"env": {"leaves_evaluation": code}})
    rig.go(run_id)
    record = await rig.end(run_id)
    found = await results(rig, run_id)
    assert_complete(rig, record, found)
    assert record.processes["trainer"].exit_code == 0
    assert found.evaluation is not None and found.evaluation.status == "failed"
    expected = {-9: "the environment was killed", 0: "left no result", 1: "the environment exited with code 1"}
    assert expected[code] in found.evaluation.reason


async def test_an_evaluation_that_hangs_ends_at_its_bound_and_the_run_is_completed(rig: Rig) -> None:
    deaf = {**STAYS, "stays_s": 0.5, "hang_after_report": True, "ignore_term": True}
    run_id = await rig.start({"trainer": deaf}, completion_exit_s=0.3, kill_s=0.5)
    record = await rig.end(run_id)
    assert_complete(rig, record, await results(rig, run_id))
    assert record.processes["trainer"].forced
    assert rig.events(run_id)[-1].reason == "the trainer completed but did not exit; it was made to"


async def test_a_stop_in_the_evaluation_ends_it_and_the_run_is_completed(rig: Rig) -> None:
    run_id = await evaluating(rig, {"trainer": {**STAYS, "stays_s": 600}}, kill_s=60)
    await launch.stop(rig.home, run_id, "enough")
    record = await rig.end(run_id)
    assert_complete(rig, record, await results(rig, run_id))
    assert record.stop_reason == "enough"
    assert (record.processes["trainer"].exit_code, record.processes["trainer"].forced) == (0, True)


async def test_a_run_whose_supervisor_dies_in_the_evaluation_is_completed_for_its_readers(rig: Rig) -> None:
    run_id = await evaluating(rig, {})
    supervisor = rig.store.get(run_id).supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    await until(lambda: rig.store.get(run_id).status.terminal)
    assert_complete(rig, rig.store.get(run_id), await results(rig, run_id))
    assert "while it was evaluated" in rig.events(run_id)[-1].reason


async def test_environments_without_the_notion_are_said_to_be_skipped(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"checkpoint_every": 3}}, rig.request(env_base="atroposlib"))
    await rig.end(run_id)
    found = (await results(rig, run_id)).evaluation
    assert found is not None and found.status == "skipped" and "written for Atropos" in found.reason
    older = await rig.start({"trainer": {"checkpoint_every": 3}})
    await rig.end(older)
    assert (await results(rig, older)).evaluation is None

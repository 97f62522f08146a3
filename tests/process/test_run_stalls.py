"""A run in which nothing moves is flagged, with who waits for what, and goes on by itself when something does."""

from __future__ import annotations

import os
import signal
import time

import anyio
import psutil
import pytest
import yaml
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.contracts.vitals import Vitals
from hermes_rl_mcp.runs import launch

pytestmark = pytest.mark.anyio


def pid(record: RunRecord, name: str) -> int:
    identity = next(process.identity for key, process in record.processes.items() if key == name)
    assert identity is not None
    return identity.pid


def vitals(rig: Rig, run_id: str) -> Vitals:
    return Vitals.model_validate_json(rig.paths(run_id).vitals.read_bytes())


def still(rig: Rig, run_id: str) -> bool:
    """Nothing has moved for a second since step 1, and the trainer answers: on a busy machine not at every look."""
    seen = vitals(rig, run_id)
    return (
        seen.step == 1
        and seen.idle_s >= 1
        and seen.processes["trainer"].answers
        and "the trainer waits for a batch" in seen.waiting
    )


async def test_fi_24_a_run_that_hangs_is_stalled_with_who_waits_for_what_and_goes_on_when_it_moves(rig: Rig) -> None:
    knobs = {"trainer": {"hold_at": 1, "step_s": 0.3}, "env": {"say": "asking the judge, {prefix}\n"}}
    run_id = await rig.start(knobs, vitals_s=0.1, stall_s=1)
    await until(lambda: rig.store.metrics(run_id).lines)  # a busy machine may make it seem stalled before that, too
    record = await rig.wait(run_id, lambda record: record.stalled)
    assert record.status is RunStatus.RUNNING
    reason = record.stalled_reason or ""
    assert "Nothing has moved for" in reason and "0 of 2 groups queued" in reason, reason
    assert "has no request open at the sampler" in reason and "Groups queued: 0." in reason
    assert "Last log line of the environment: asking the judge, ***" in reason, "masked, and of the culprit"
    await until(lambda: still(rig, run_id))
    seen = vitals(rig, run_id)
    assert seen.queue_size == 0 and seen.memory_bytes
    assert all(process.memory_bytes and process.state for process in seen.processes.values())
    identities = {name: process.identity for name, process in record.processes.items()}
    rig.go(run_id)
    record = await rig.end(run_id)
    assert record.status is RunStatus.COMPLETED and not record.stalled and record.stalled_reason is None
    assert {name: process.identity for name, process in record.processes.items()} == identities, "nothing was restarted"
    reasons = [event.reason for event in rig.events(run_id)]
    flagged = [reason.split(".")[0] for reason in reasons if "stalled" in reason]
    assert flagged == ["stalled", "no longer stalled: something moves again"] * (len(flagged) // 2)


async def test_fi_24_a_batch_that_the_trainer_does_not_take_is_the_trainers_fault_and_no_secret_is_shown(
    rig: Rig,
) -> None:
    trainer = {"hold_at": 1, "phase": "asking http://h:1/{prefix}/batch", "say": "told to wait\n"}
    run_id = await rig.start({"api": {"queue_size": 3}, "trainer": trainer}, vitals_s=0.1, stall_s=1)
    record = await rig.wait(run_id, lambda record: record.stalled)
    reason = record.stalled_reason or ""
    assert "a batch is ready (3 groups queued), but the trainer does not take it" in reason, reason
    assert "(asking http://h:1/***/batch)" in reason and "Last log line of the trainer: told to wait" in reason
    prefix = yaml.safe_load(rig.paths(run_id).config.read_text())["run"]["path_prefix"]
    for path in (rig.paths(run_id).vitals, rig.paths(run_id).record, rig.paths(run_id).events):
        assert prefix not in path.read_text(), path
    await until(lambda: vitals(rig, run_id).processes["trainer"].doing == "asking http://h:1/***/batch")
    await launch.stop(rig.home, run_id, "test")
    assert not (await rig.end(run_id)).stalled


async def test_fi_32_a_stopped_trainer_is_stalled_not_dead_and_runs_on_when_it_is_continued(rig: Rig) -> None:
    knobs = {"trainer": {"step_s": 0.1}}
    request = rig.request(env={"total_steps": 40, "group_size": 2, "batch_size": 4, "max_token_length": 16})
    run_id = await rig.start(knobs, request, vitals_s=0.1, stall_s=1.5)
    record = await rig.running(run_id)
    os.kill(pid(record, "trainer"), signal.SIGSTOP)
    try:
        record = await rig.wait(run_id, lambda record: record.stalled)
        assert record.status is RunStatus.RUNNING and "the trainer is stopped (SIGSTOP)" in (
            record.stalled_reason or ""
        )
        await until(lambda: vitals(rig, run_id).processes["trainer"].state == psutil.STATUS_STOPPED)
        await until(lambda: vitals(rig, run_id).processes["trainer"].answers is False)
        step = vitals(rig, run_id).step
    finally:
        os.kill(pid(record, "trainer"), signal.SIGCONT)
    record = await rig.wait(run_id, lambda record: not record.stalled)
    assert record.status in (RunStatus.RUNNING, RunStatus.COMPLETED)
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED and step < 40
    assert "no longer stalled: something moves again" in [event.reason for event in rig.events(run_id)]


async def test_fi_33_files_that_cannot_be_read_for_a_while_change_nothing(rig: Rig) -> None:
    run_id = await rig.start(HOLD, vitals_s=0.1)
    await rig.running(run_id)
    paths = rig.paths(run_id)
    record_text = paths.record.read_bytes()
    for path in (paths.stop_request, paths.report("trainer"), paths.env_state):
        path.mkdir()  # reading it fails, and not because it is missing
    before = vitals(rig, run_id).time
    await until(lambda: vitals(rig, run_id).time != before)
    await anyio.sleep(0.5)  # some ticks: nothing is to happen in them
    assert paths.record.read_bytes() == record_text and rig.store.get(run_id).status is RunStatus.RUNNING
    for path in (paths.stop_request, paths.report("trainer"), paths.env_state):
        path.rmdir()
    rig.go(run_id)
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED


async def test_what_a_run_took_is_on_record(rig: Rig) -> None:
    run_id = await rig.start(HOLD, vitals_s=0.1)
    record = await rig.running(run_id)
    assert record.startup_seconds is not None and 0 < record.startup_seconds < 60
    assert record.running_clock is not None and record.running_clock <= time.monotonic()
    await until(lambda: (vitals(rig, run_id).peak_memory_bytes or 0) > 3 * 2**20)
    await launch.stop(rig.home, run_id, "test")
    record = await rig.end(run_id)
    assert record.peak_memory_bytes is not None and record.peak_memory_bytes > 3 * 2**20
    assert record.disk_bytes is not None and 4096 < record.disk_bytes < 2**20
    await until(lambda: not rig.paths(run_id).reserve.exists())

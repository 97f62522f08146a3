"""What a client is told of a repeated start, of a run that never trained, of a frozen supervisor: only what is so."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.files import read_file, write_atomic
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.process import signal_process
from hermes_rl_mcp.server import text

pytestmark = pytest.mark.anyio


async def test_a_key_that_was_used_before_is_said_to_start_nothing(rig: Rig) -> None:
    run_id = await rig.start(HOLD, rig.request(idempotency_key="once"))
    operations = Operations(load_settings(rig.environ))
    again = await operations.start_training("once")
    assert again.run_id == run_id and again.warnings == []
    assert "Nothing new was started" in again.message and "goes on without this client" not in again.message
    other = await operations.start_training("once", resume_from="0123abcd")
    assert [f"resume_from='0123abcd' was not followed: run {run_id} continues no run."] == other.warnings
    await launch.stop(rig.home, run_id, "test")
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    assert "it is stopped." in (await operations.start_training("once")).message


async def test_a_run_that_was_stopped_before_its_first_step_is_not_said_to_go_on(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"hold_at": 0}})
    await launch.stop(rig.home, run_id, "test")
    await rig.end(run_id)
    shown = text.status(await Operations(load_settings(rig.environ)).check_status(run_id))
    assert "stopped" in shown and "resume_from" not in shown


async def test_a_supervisor_that_is_stopped_is_said_to_look_no_more(rig: Rig) -> None:
    run_id = await rig.start(HOLD, vitals_s=0.1)
    operations = Operations(load_settings(rig.environ))
    await rig.running(run_id)
    supervisor = rig.store.get(run_id).supervisor
    assert supervisor is not None
    await until(lambda: rig.paths(run_id).vitals.exists())
    signal_process(supervisor, signal.SIGSTOP)
    try:
        await until(lambda: psutil.Process(supervisor.pid).status() == psutil.STATUS_STOPPED)
        old = json.loads(read_file(rig.paths(run_id).vitals))
        write_atomic(rig.paths(run_id).vitals, json.dumps({**old, "time": "2026-01-01T00:00:00+00:00"}))
        answer = await operations.check_status(run_id)
        assert f"supervisor (pid {supervisor.pid}) does not look" in answer.waiting
        assert "has not taken it up yet" in (await operations.stop_training(run_id)).message
    finally:
        signal_process(supervisor, signal.SIGCONT)
    assert (await rig.end(run_id)).status is RunStatus.STOPPED, "the request held"

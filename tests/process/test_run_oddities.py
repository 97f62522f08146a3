"""What happens around a run that nobody planned: daemons, floods, deleted folders, failures that hide behind others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import anyio
import pytest
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.runs import launch, locks
from hermes_rl_mcp.runs.process import identity_of, is_alive
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState

pytestmark = pytest.mark.anyio


async def test_fi_12_a_daemon_that_left_group_session_and_marker_behind_is_ended_with_the_run(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"grandchild": "hidden", "die_on_go": 1}}, vitals_s=0.1)
    await rig.running(run_id)
    pid_file = rig.paths(run_id).dir / "hidden_pid"
    await until(lambda: pid_file.exists() and pid_file.read_text())
    hidden = identity_of(int(pid_file.read_text()))
    assert hidden is not None and hidden.pid not in {process.pid for process in rig.marked(run_id)}
    assert is_alive(hidden)
    rig.go(run_id)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED and record.leftover_pids == []
    assert not is_alive(hidden)


async def test_fi_08_a_failure_that_hides_behind_the_death_of_another_is_found(rig: Rig) -> None:
    report = {"status": "failed", "step": 1, "error": "CUDA out of memory at step 2.", "hint": "Halve batch_size."}
    knobs = {
        "trainer": {"die_on_go": 1, "silent_before_death": True, "report": report},
        "env": {"die_with_trainer": 9, "say": "no answer from the sampler\n"},
    }
    run_id = await rig.start(knobs, cascade_s=60)
    environment = (await rig.running(run_id)).processes["env"].identity
    assert environment is not None
    rig.go(run_id)
    await until(lambda: not is_alive(environment))
    (rig.paths(run_id).dir / "dies").touch()
    record = await rig.end(run_id)
    assert (record.error, record.hint) == ("CUDA out of memory at step 2.", "Halve batch_size.")
    assert record.processes["env"].exit_code == 9, "it was the first to die"


async def test_fi_08_an_environment_that_dies_of_itself_is_blamed_at_once(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"hang_at": 1}, "env": {"die_on_go": 9}}, cascade_s=300)
    await rig.running(run_id)
    rig.go(run_id)
    record = await rig.end(run_id)
    assert "The environment exited with code 9" in (record.error or "")


async def test_fi_15_a_flood_of_output_is_cut_before_it_fills_the_disk(rig: Rig) -> None:
    limit = 8 * 2**20
    run_id = await rig.start({**HOLD, "env": {"spew_mb_per_s": 30}}, log_max_bytes=limit)
    log = rig.home.log("env", run_id)
    largest, deadline = 0, time.monotonic() + 100
    while len(cuts := [event for event in rig.events(run_id) if "cut" in event.reason]) < 2:
        largest = max(largest, log.stat().st_size if log.exists() else 0)
        assert time.monotonic() < deadline
        await anyio.sleep(0.01)
    assert cuts[1].reason.startswith(f"log {log.name} cut for the 10th time"), "80 MB and more went through"
    assert largest < limit + 100 * 2**20, "the limit, and what fits into a very late tick"
    # Right after a cut there is nothing in it.
    await until(lambda: "42% of all there is" in rig.log_tail(run_id, "env", 2000))
    began = time.process_time()  # a busy machine costs none
    rig.log_tail(run_id, "env", 2000)
    assert time.process_time() - began < 3
    await launch.stop(rig.home, run_id, "test")
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    assert log.with_name(log.name + ".1").stat().st_size <= 2**20


async def test_a_run_whose_directory_is_deleted_ends_without_a_trace_of_itself(rig: Rig) -> None:
    run_id = await rig.start(HOLD, vitals_s=0.1)
    await rig.running(run_id)
    os.rename(rig.paths(run_id).dir, rig.folder / "thrown away")
    await until(lambda: not rig.marked(run_id))
    rig.started.remove(run_id)
    log = rig.home.log("supervisor", run_id).read_text()
    assert f"{rig.paths(run_id).dir} was deleted while its run was going" in log
    assert "Traceback" not in log and not rig.paths(run_id).dir.exists()
    assert rig.store.list() == []


async def test_what_a_killed_launcher_left_half_made_goes_with_a_later_start(rig: Rig) -> None:
    drafts = [rig.home.runs / f".new-{name}" for name in ("0000000a", "0000000b", "0000000c")]
    for draft in drafts:
        (draft / "inside").mkdir(parents=True)
    held = locks.take(drafts[1] / "inside" / "supervisor.lock")
    assert held is not None
    for draft in drafts[:2]:
        os.utime(draft, (time.time() - 3600,) * 2)
    run_id = await rig.start()
    await rig.end(run_id)
    assert [draft.exists() for draft in drafts] == [False, True, True], "old and nobody at work on it"
    held.release()


async def test_a_start_that_the_file_system_refuses_is_refused_with_the_reason(rig: Rig) -> None:
    request = rig.request()
    rig.home.log("supervisor", request.run_id).mkdir(parents=True)
    with pytest.raises(PreflightError, match="supervisor could not be started: Is a directory"):
        await launch.start(rig.home, request, rig.script())
    record = rig.store.get(request.run_id)
    assert record.status is RunStatus.FAILED and "could not be started" in (record.error or "")
    in_the_way = rig.home.runs / ".new-0000000d"
    in_the_way.touch()
    with pytest.raises(PreflightError, match="could not be started: "):
        await launch.start(rig.home, rig.request(run_id="0000000d"), rig.script())
    assert in_the_way.exists(), "it is not ours to remove"


@pytest.mark.parametrize("dead", [True, False])
async def test_fi_03_a_killed_supervisor_that_still_lets_go_of_its_lock_is_waited_for(
    rig: Rig, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:  # noqa: ASYNC220 - it blocks for the time of a fork
        ended = identity_of(process.pid)
    request = rig.request()
    paths = rig.paths(request.run_id)
    paths.dir.mkdir(parents=True)
    supervisor = ended if dead else identity_of(os.getpid())
    changes = {"status": RunStatus.RUNNING, "supervisor": supervisor}
    RunState.create(paths, first_record(rig.home, request).model_copy(update=changes), "forged")
    lock = locks.take(paths.supervisor_lock)
    assert lock is not None
    if not dead:
        assert rig.store.get(request.run_id).status is RunStatus.RUNNING, "of a live one the lock says enough"
        lock.release()
        return
    monkeypatch.setattr("hermes_rl_mcp.runs.reconcile._DYING_S", 60.0)
    last_thread = threading.Timer(0.2, lock.release)
    last_thread.start()
    assert rig.store.get(request.run_id).status is RunStatus.INTERRUPTED
    last_thread.join()

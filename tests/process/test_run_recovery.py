"""What becomes of a run when a supervisor, a server or the machine dies, and that no stranger is ever signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.checkpoints import MARKER
from hermes_rl_mcp.contracts.runs import Identity, RunRecord, RunStatus
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs import launch, locks
from hermes_rl_mcp.runs.claims import holder
from hermes_rl_mcp.runs.process import identity_of, is_alive
from hermes_rl_mcp.runs.reconcile import fail, reconcile
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState, read_record
from hermes_rl_mcp.runs.store import RunStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """An unrelated process that leads a group of its own, as a child of a run would."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def forge(rig: Rig, status: RunStatus, supervisor: Identity | None, trainer: Identity | None) -> str:
    """A run directory whose record claims these processes, and that nobody supervises."""
    request = rig.request()
    paths = rig.paths(request.run_id)
    paths.dir.mkdir(parents=True)
    paths.request.write_text(request.model_dump_json())
    record = first_record(rig.home, request)
    processes = {**record.processes, "trainer": record.processes["trainer"].model_copy(update={"identity": trainer})}
    changes = {"status": status, "supervisor": supervisor, "processes": processes}
    RunState.create(paths, record.model_copy(update=changes), "forged")
    return request.run_id


def gone() -> Identity:
    """Names a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = identity_of(process.pid)
    process.wait()
    assert identity is not None
    return identity


async def kill_supervisor(record: RunRecord) -> None:
    assert record.supervisor is not None
    os.kill(record.supervisor.pid, signal.SIGKILL)
    supervisor = record.supervisor
    await until(lambda: not is_alive(supervisor))


async def test_fi_03_killed_supervisor_takes_its_children_along_and_the_run_is_interrupted(rig: Rig) -> None:
    run_id = await rig.start(HOLD)
    await kill_supervisor(await rig.running(run_id))
    await until(lambda: not rig.marked(run_id))  # by the lifeline alone: nobody has looked at the run
    assert read_record(rig.paths(run_id)).status is RunStatus.RUNNING
    record = rig.store.get(run_id)
    assert record.status is RunStatus.INTERRUPTED and "supervisor is gone" in (record.error or "")
    assert rig.store.get(run_id) == record


async def test_fi_03_children_without_lifeline_are_ended_by_identity_and_keep_the_device_until_then(rig: Rig) -> None:
    stubborn = {"lifeline_grace_s": 300, "ignore_term": True}
    run_id = await rig.start({"trainer": {"hold_at": 1, **stubborn, "grandchild": "session"}})
    running = await rig.running(run_id)
    await kill_supervisor(running)
    claims = Path(rig.environ["HERMES_RL_CLAIMS_DIR"])
    assert holder(claims, "cpu") == run_id, "its trainer lives, so it has the device"
    second = await rig.start(HOLD)
    assert rig.store.get(second).queue_position == 1 and rig.store.get(second).processes["trainer"].identity is None
    record = rig.store.get(run_id)
    assert record.status is RunStatus.INTERRUPTED and record.leftover_pids == []
    assert "supervisor is gone" in (record.error or "")
    assert not rig.marked(run_id)
    await rig.running(second)
    assert holder(claims, "cpu") == second
    await launch.stop(rig.home, second, "test")
    await rig.end(second)


async def test_fi_13_a_reused_pid_is_never_signalled(rig: Rig, bystander: subprocess.Popen[bytes]) -> None:
    real = identity_of(bystander.pid)
    assert real is not None
    forged = real.model_copy(update={"started_at": real.started_at - 5})
    run_id = forge(rig, RunStatus.RUNNING, gone(), forged)
    assert rig.store.get(run_id).status is RunStatus.INTERRUPTED
    assert bystander.poll() is None


async def test_a_live_process_that_must_not_be_signalled_is_reported_instead(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.RUNNING, gone(), identity_of(os.getpid()))
    record = rig.store.get(run_id)  # we live to see it
    assert record.status is RunStatus.INTERRUPTED and record.leftover_pids == [os.getpid()]


async def test_fi_14_after_a_reboot_everything_is_interrupted_and_nothing_signalled(
    rig: Rig, bystander: subprocess.Popen[bytes]
) -> None:
    real = identity_of(bystander.pid)
    assert real is not None
    before = real.model_copy(update={"boot_id": "another-boot"})
    run_id = forge(rig, RunStatus.RUNNING, before, before)
    checkpoint = rig.paths(run_id).checkpoints / "step_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).touch()
    record = rig.store.get(run_id)
    assert record.status is RunStatus.INTERRUPTED and "restarted" in (record.error or "")
    assert f"resume_from='{run_id}'" in (record.hint or "")
    assert bystander.poll() is None


async def test_a_lost_run_without_a_checkpoint_is_not_said_to_go_on_from_one(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.RUNNING, gone(), None)
    hint = rig.store.get(run_id).hint or ""
    assert "no complete checkpoint" in hint and "resume_from" not in hint


async def test_a_queued_run_keeps_its_turn_over_a_reboot(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.QUEUED, gone().model_copy(update={"boot_id": "another-boot"}), None)
    assert rig.store.get(run_id).status is RunStatus.QUEUED
    rig.home.logs.mkdir(parents=True, exist_ok=True)
    rig.started.append(run_id)
    assert await launch.relaunch_queued(rig.home, rig.script()) == [run_id]
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED
    assert await launch.relaunch_queued(rig.home, rig.script()) == []


async def test_who_only_looks_whether_a_run_has_a_supervisor_does_not_cost_it_its_turn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = forge(rig, RunStatus.QUEUED, gone().model_copy(update={"boot_id": "another-boot"}), None)
    rig.home.logs.mkdir(parents=True, exist_ok=True)
    rig.started.append(run_id)
    listed = rig.store.active()
    monkeypatch.setattr(RunStore, "active", lambda self: listed)
    monkeypatch.setattr(locks, "PROBE_S", 60.0)  # a look takes an instant; this one takes longer
    with looked_at(rig.paths(run_id).supervisor_lock):
        assert await launch.relaunch_queued(rig.home, rig.script()) == [run_id]
    lost = forge(rig, RunStatus.QUEUED, gone(), None)
    with looked_at(rig.paths(lost).supervisor_lock):
        assert fail(rig.paths(lost), "died at once", "It died.", "See its log.").status is RunStatus.FAILED
    assert (await rig.end(run_id)).status is RunStatus.COMPLETED


@contextlib.contextmanager
def looked_at(path: Path) -> Iterator[None]:
    """Holds the lock as ``is_held`` does, longer than an instant."""
    path.touch(0o600)
    looking = locks.share(path)
    assert looking is not None
    done = threading.Timer(0.2, looking.release)
    done.start()
    yield
    done.join()


async def test_a_queued_run_without_supervisor_can_be_stopped(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.QUEUED, gone().model_copy(update={"boot_id": "another-boot"}), None)
    record = await launch.stop(rig.home, run_id, "not needed")
    assert record.status is RunStatus.STOPPED and record.stop_reason == "not needed"


async def test_two_readers_at_once_close_a_lost_run_once(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.RUNNING, gone(), None)
    seen = read_record(rig.paths(run_id))
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(anyio.to_thread.run_sync, rig.store.get, run_id)
    assert rig.store.get(run_id).status is RunStatus.INTERRUPTED
    assert reconcile(rig.paths(run_id), seen).status is RunStatus.INTERRUPTED, "by one who had read it before"
    assert sum(event.status.terminal for event in rig.events(run_id)) == 1


async def test_a_second_supervisor_for_a_run_refuses_to_start(rig: Rig) -> None:
    run_id = forge(rig, RunStatus.QUEUED, gone(), None)
    lock = locks.take(rig.paths(run_id).supervisor_lock)
    assert lock is not None
    others = psutil.Process().children()  # supervisors of earlier tests may only be leaving
    began = time.monotonic()
    done = await anyio.run_process(
        [sys.executable, "-P", "-m", "hermes_rl_mcp.runs", str(rig.paths(run_id).dir)],
        env={**rig.environ, "PYTHONPATH": str(install_root())},
        check=False,
    )
    lock.release()
    assert done.returncode == 3 and b"another supervisor" in done.stderr
    assert time.monotonic() - began < 60 and set(psutil.Process().children()) <= set(others)


async def test_a_queued_run_that_another_server_has_relaunched_meanwhile_is_left_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = forge(rig, RunStatus.QUEUED, gone().model_copy(update={"boot_id": "another-boot"}), None)
    rig.home.logs.mkdir(parents=True, exist_ok=True)
    rig.started.append(run_id)
    as_listed_before = rig.store.active()
    assert await launch.relaunch_queued(rig.home, rig.script()) == [run_id]
    ended = await rig.end(run_id)
    supervisor = ended.supervisor
    assert supervisor is not None
    await until(lambda: not is_alive(supervisor))
    monkeypatch.setattr(RunStore, "active", lambda self: as_listed_before)
    assert await launch.relaunch_queued(rig.home, rig.script()) == []
    assert rig.store.get(run_id) == ended and rig.log_tail(run_id, "supervisor").count("run " + run_id) == 1

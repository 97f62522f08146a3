"""A disk that fills up under a run: it ends, says so, names what is kept, and its record is whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_rig import Knobs, Rig, until
from small_disk import SmallDisk

from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.process import is_alive
from hermes_rl_mcp.runs.state import read_record

pytestmark = pytest.mark.anyio

SAVING: Knobs = {"trainer": {"hold_at": 1, "checkpoint_every": 1}}
"""One complete checkpoint, then waiting."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture
def rig(tmp_path: Path, environ: dict[str, str], disk: SmallDisk) -> Iterator[Rig]:
    rig = Rig(tmp_path, {**environ, "HERMES_HOME": str(disk.folder / "hermes")})
    yield rig
    disk.free()
    rig.close()


async def begun(rig: Rig, knobs: Knobs, **limits: float) -> str:
    """A run with a checkpoint of step 1."""
    run_id = await rig.start(knobs, **limits)
    await rig.running(run_id)
    await until(lambda: rig.store.checkpoints(run_id))
    return run_id


def check_words(rig: Rig, record: RunRecord) -> None:
    assert record.status is RunStatus.FAILED, rig.explain(record.run_id)
    folder = str(rig.home.root)
    assert "disk is full" in (record.error or "") and folder in (record.error or ""), record.error
    assert f"{rig.paths(record.run_id).checkpoints}/step_1" in (record.error or ""), record.error
    assert "Free some space" in (record.hint or "") and "resume_from" in (record.hint or "")
    assert rig.store.checkpoints(record.run_id)[0].marker.step == 1
    events = rig.events(record.run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert sum(event.status.terminal for event in events) <= 1
    assert not rig.marked(record.run_id)


async def test_fi_21_a_disk_that_fills_up_ends_the_run_with_that_reason(rig: Rig, disk: SmallDisk) -> None:
    run_id = await begun(rig, SAVING, vitals_s=0.1)
    disk.shrink(30 * 2**20)
    await until(lambda: any("disk space is low" in event.reason for event in rig.events(run_id)))
    disk.fill()
    record = await rig.end(run_id)
    check_words(rig, record)
    assert rig.events(run_id)[-1].reason == "disk full"
    assert sum("disk space is low" in event.reason for event in rig.events(run_id)) == 1
    supervisor = record.supervisor
    assert supervisor is not None
    await until(lambda: not is_alive(supervisor))


async def test_fi_21_a_trainer_that_cannot_write_its_metrics_is_no_riddle(rig: Rig, disk: SmallDisk) -> None:
    run_id = await begun(rig, SAVING, vitals_s=600)
    disk.fill()
    rig.go(run_id)  # an empty file takes no room here
    record = await rig.end(run_id)
    check_words(rig, record)
    assert "trainer exited with code 1" in (record.error or "")


async def test_fi_21_a_stop_on_a_full_disk_is_a_stop_and_all_of_it_is_on_record(rig: Rig, disk: SmallDisk) -> None:
    run_id = await begun(rig, SAVING, vitals_s=600)
    disk.fill()
    await launch.stop(rig.home, run_id, "enough")
    record = await rig.end(run_id)
    assert record.status is RunStatus.STOPPED and record.processes["trainer"].exit_code is not None
    assert not rig.marked(run_id) and rig.store.checkpoints(run_id)


@pytest.mark.parametrize("reserve", [True, False])
async def test_fi_21_a_run_whose_supervisor_was_killed_on_a_full_disk_is_closed_once_and_says_so(
    rig: Rig, disk: SmallDisk, reserve: bool
) -> None:
    run_id = await begun(rig, SAVING, vitals_s=600)
    record = rig.store.get(run_id)
    if not reserve:
        rig.paths(run_id).reserve.unlink()
    disk.fill()
    assert record.supervisor is not None
    os.kill(record.supervisor.pid, signal.SIGKILL)
    record = await rig.end(run_id)
    assert record.status is RunStatus.INTERRUPTED and "The disk is full" in (record.error or "")
    assert rig.store.get(run_id).status is RunStatus.INTERRUPTED
    written = read_record(rig.paths(run_id)).status
    assert written is (RunStatus.INTERRUPTED if reserve else RunStatus.RUNNING), "shown although it cannot be written"
    disk.free()
    assert rig.store.get(run_id).status is read_record(rig.paths(run_id)).status is RunStatus.INTERRUPTED
    assert sum(event.status is RunStatus.INTERRUPTED for event in rig.events(run_id)) == 1


async def test_fi_21_without_its_reserve_the_record_is_closed_as_soon_as_there_is_room(
    rig: Rig, disk: SmallDisk
) -> None:
    elsewhere = rig.folder / "logs"  # so that the supervisor can still say what it does
    elsewhere.mkdir()
    rig.home.root.mkdir(parents=True)
    (rig.home.root / "logs").symlink_to(elsewhere)
    run_id = await begun(rig, SAVING, vitals_s=600)
    rig.paths(run_id).reserve.unlink()
    disk.fill()
    record = rig.store.get(run_id)
    assert record.supervisor is not None
    os.kill(record.supervisor.pid, signal.SIGTERM)
    log = rig.home.log("supervisor", run_id)
    await until(lambda: "its end cannot be written: [Errno 28]" in log.read_text(), 40)
    assert not rig.marked(run_id), "it ends its processes first"
    assert rig.store.get(run_id).status is RunStatus.RUNNING
    disk.free()
    assert (await rig.end(run_id)).status is RunStatus.STOPPED
    assert [event.status for event in rig.events(run_id)][-2:] == [RunStatus.STOPPING, RunStatus.STOPPED]

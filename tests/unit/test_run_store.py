"""What is read of runs: whole lines only, finished checkpoints only, and one bad run hides no other."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from test_run_state import create

from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.contracts.runs import UNKNOWN, RunRecord, RunStatus, has_ended
from hermes_rl_mcp.errors import UnknownRunError, UnreadableRunError
from hermes_rl_mcp.files import read_tail
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import locks, state
from hermes_rl_mcp.runs.process import identity_of
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.store import RunStore, Unreadable


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def add(home: Home, run_id: str, status: RunStatus = RunStatus.COMPLETED, created_at: str = "2026-01-01") -> None:
    paths = home.run(run_id)
    paths.dir.mkdir(parents=True)
    state = create(paths, status)
    paths.record.write_text(state.record.model_copy(update={"created_at": created_at}).model_dump_json())


def test_runs_come_newest_first_and_an_unreadable_one_hides_no_other(home: Home) -> None:
    add(home, "0000000a", created_at="2026-01-01")
    add(home, "0000000b", created_at="2026-01-03")
    add(home, "0000000c", created_at="2026-01-02")
    home.run("0000000c").record.write_text("{")
    (home.runs / "not-a-run").mkdir()
    found = RunStore(home).list()
    assert {run.run_id for run in found} == {"0000000a", "0000000b", "0000000c"}
    readable = [run.run_id for run in found if isinstance(run, RunRecord)]
    assert readable == ["0000000b", "0000000a"]
    unreadable = next(run for run in found if isinstance(run, Unreadable))
    assert unreadable.run_id == "0000000c" and "damaged" in unreadable.reason
    with pytest.raises(UnreadableRunError, match="damaged"):
        RunStore(home).get("0000000c")
    assert home.run("0000000c").record.read_text() == "{"


@pytest.mark.parametrize("run_id", ["0000000f", "../../etc", "", "0000000A", "0000000a/..", "0000000a\n"])
def test_an_unknown_run_names_the_active_ones(home: Home, run_id: str) -> None:
    add(home, "0000000a", RunStatus.RUNNING)
    lock = locks.take(home.run("0000000a").supervisor_lock)
    assert lock is not None
    with pytest.raises(UnknownRunError) as caught:
        RunStore(home).get(run_id)
    assert caught.value.details["active_runs"] == ["0000000a"]
    lock.release()


def test_a_run_that_cannot_be_closed_is_shown_as_it_is_and_hides_no_other(home: Home) -> None:
    add(home, "0000000a")
    add(home, "0000000b", RunStatus.RUNNING)
    home.run("0000000b").supervisor_lock.symlink_to("itself")
    shown = {run.run_id: run.status for run in RunStore(home).list() if isinstance(run, RunRecord)}
    assert shown == {"0000000a": RunStatus.COMPLETED, "0000000b": RunStatus.RUNNING}


class Hiccup:
    """Fails the next ``times`` reads of a run's record, as a network file system does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> None:
        self.left, self.number = times, number
        self.read = state.read_file
        monkeypatch.setattr(state, "read_file", self)

    def __call__(self, path: Path) -> bytes:
        if path.name == "run.json" and self.left > 0:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(path))
        return self.read(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_fi_33_a_read_that_fails_for_a_moment_is_repeated_and_changes_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    add(home, "0000000a", RunStatus.RUNNING)
    lock = locks.take(home.run("0000000a").supervisor_lock)
    assert lock is not None
    before = home.run("0000000a").record.read_bytes()
    hiccup = Hiccup(monkeypatch, 2, number)
    assert RunStore(home).get("0000000a").status is RunStatus.RUNNING and hiccup.left == 0
    assert home.run("0000000a").record.read_bytes() == before
    lock.release()


def test_fi_33_a_record_that_stays_out_of_reach_is_unknown_not_failed_and_nothing_is_concluded(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(home, "0000000a", RunStatus.RUNNING)  # without a supervisor: a reader would close it
    add(home, "0000000b")
    files = {path: path.read_bytes() for path in home.run("0000000a").dir.iterdir()}
    hiccup = Hiccup(monkeypatch, 1000, errno.EIO)
    hiccup.left = 4  # all tries at one of the two
    shown = {run.run_id: run for run in RunStore(home).list()}
    unknown = [run for run in shown.values() if isinstance(run, Unreadable)]
    assert [run.label for run in unknown] == [UNKNOWN] and "Input/output error" in unknown[0].reason
    assert not has_ended(UNKNOWN)
    if unknown[0].run_id == "0000000a":
        assert {path: path.read_bytes() for path in home.run("0000000a").dir.iterdir()} == files
    hiccup.left = 1000
    with pytest.raises(UnreadableRunError, match="cannot be read now") as caught:
        RunStore(home).get("0000000a")
    assert caught.value.details["status"] == UNKNOWN and caught.value.hint == "Try again."
    hiccup.left = 0
    assert RunStore(home).get("0000000b").status is RunStatus.COMPLETED


@pytest.mark.parametrize("jump_s", [-3600.0, 86_400.0])
def test_fi_31_a_jump_of_the_wall_clock_does_not_change_how_long_a_run_has_run(
    home: Home, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    add(home, "0000000a", RunStatus.STARTING)
    paths = home.run("0000000a")
    lock = locks.take(paths.supervisor_lock)
    assert lock is not None
    writer = RunState.load(paths)
    writer.update(supervisor=identity_of(os.getpid()))
    writer.move(RunStatus.RUNNING, "ready")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    stamp = real() + jump_s
    os.utime(paths.record, (stamp, stamp))
    first = RunStore(home).get("0000000a").running_seconds
    second = RunStore(home).get("0000000a").running_seconds
    assert 0 < first < second < 60
    record = writer.record
    assert record.running_clock is not None
    other_boot = identity_of(os.getpid()).model_copy(update={"boot_id": "another"})
    paths.record.write_text(record.model_copy(update={"supervisor": other_boot}).model_dump_json())
    assert RunStore(home).get("0000000a").running_seconds == record.running_seconds, "its clock means nothing here"
    lock.release()


def test_a_home_without_runs_has_none(home: Home) -> None:
    assert RunStore(home).list() == [] and RunStore(home).active() == []


def test_metrics_are_read_on_from_an_offset_and_a_torn_line_waits(home: Home) -> None:
    add(home, "0000000a")
    store, path = RunStore(home), home.run("0000000a").metrics
    assert store.metrics("0000000a") == ([], 0)
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    lines, offset = store.metrics("0000000a")
    assert [line["step"] for line in lines] == [1, 2]
    assert store.metrics("0000000a", offset) == ([], offset)
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert store.metrics("0000000a", offset).lines == [{"step": 3}]
    assert store.latest("0000000a") == {"step": 3}


def test_a_damaged_line_is_skipped_and_those_around_it_count(home: Home) -> None:
    add(home, "0000000a")
    home.run("0000000a").metrics.write_bytes(b'{"step": 1}\n\x00\x00\n[1]\n{"step": 2}\n')
    assert [line["step"] for line in RunStore(home).metrics("0000000a").lines] == [1, 2]


def test_a_last_line_of_many_parts_is_found(home: Home) -> None:
    add(home, "0000000a")
    parts = ", ".join(f'"reward/{at}": 0.5' for at in range(3000))
    home.run("0000000a").metrics.write_text(f'{{"step": 1}}\n{{{parts}, "step": 2}}\n')
    latest = RunStore(home).latest("0000000a")
    assert latest is not None and latest["step"] == 2


@pytest.mark.parametrize("figure", ["9" * 400, "-" + "9" * 5000, "1e999", "-1.7e308", "NaN", "[" * 5_000])
def test_a_figure_that_nobody_can_compute_with_is_none(home: Home, figure: str) -> None:
    add(home, "0000000a")
    home.run("0000000a").metrics.write_text(f'{{"step": 1}}\n{{"step": 2, "reward/mean": {figure}}}\n')
    store = RunStore(home)
    for line in (store.latest("0000000a"), store.metrics("0000000a").lines[-1], store.recent("0000000a", 1)[0]):
        assert line is not None and line.get("reward/mean") is None


def test_the_end_of_a_log_is_bounded_whole_lines_of_any_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_tail(log, 8192) == ""
    log.write_bytes(b"start\r\n  1%\r 50%\r100%\nbad \xff byte\n")
    assert read_tail(log, 8192).split("\n") == ["start", "  1%", " 50%", "100%", "bad \ufffd byte"]
    assert read_tail(log, 12) == "bad \ufffd byte"
    log.write_bytes(b"x" * 100)
    assert read_tail(log, 10) == "x" * 10


def test_only_checkpoints_with_a_valid_marker_and_all_files_are_shown_in_order(home: Home) -> None:
    add(home, "0000000a")
    folder = home.run("0000000a").checkpoints
    for step in (10, 2, 3, 4, 5):
        path = folder / f"step_{step}"
        path.mkdir(parents=True)
        marker = CheckpointMarker(
            step=step,
            policy_version=step,
            base_model="m",
            base_sha256="",
            lora_rank=4,
            files={"adapter/adapter_model.safetensors": "0" * 64},
            created_at="2026-01-01",
        )
        (path / "adapter").mkdir()
        (path / "adapter/adapter_model.safetensors").touch()
        (path / "complete.json").write_text(marker.model_dump_json())
    (folder / "step_3/complete.json").unlink()
    (folder / "step_4/complete.json").write_text('{"step": 4')
    (folder / "step_5/adapter/adapter_model.safetensors").unlink()
    found = RunStore(home).checkpoints("0000000a")
    assert [(one.path.name, one.marker.step) for one in found] == [("step_2", 2), ("step_10", 10)]


def test_a_report_that_is_no_report_counts_as_none(home: Home) -> None:
    add(home, "0000000a")
    store, path = RunStore(home), home.run("0000000a").report("trainer")
    assert store.report("0000000a", "trainer") is None
    path.write_text('{"process": "trainer"')
    assert store.report("0000000a", "trainer") is None
    path.write_text(json.dumps({"process": "trainer", "status": "completed", "finished_at": "x", "step": 7}))
    report = store.report("0000000a", "trainer")
    assert report is not None and report.step == 7

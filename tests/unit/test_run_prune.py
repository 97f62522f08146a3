"""What ``hermes-rl runs prune`` deletes, and what it never touches."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from test_run_state import create

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.errors import PreflightError, ResumeError
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.paths import PROCESS_LOGS, Home
from hermes_rl_mcp.runs import locks, prune, resume
from hermes_rl_mcp.runs.process import identity_of

MIB = 1 << 20
RUNS = ["0000000a", "0000000b", "0000000c", "0000000d"]
"""From the one that ended first to the one that ended last."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.logs.mkdir(parents=True)
    home.checks.mkdir(parents=True)
    for day, run_id in enumerate(RUNS, 1):
        add(home, run_id, day)
    return home


def add(home: Home, run_id: str, day: int, status: RunStatus = RunStatus.COMPLETED, **changes: object) -> None:
    """A run that ended on that day of January and takes a little more than 2 MiB."""
    paths = home.run(run_id)
    paths.checkpoints.mkdir(parents=True)
    record = create(paths, status).record.model_copy(update={"ended_at": f"2026-01-{day:02d}T00:00:00Z", **changes})
    paths.record.write_text(record.model_dump_json())
    (paths.checkpoints / "weights").write_bytes(b"w" * MIB)
    for process in PROCESS_LOGS:
        home.log(process, run_id).write_bytes(b"l" * (MIB // 4))
    home.log("env", run_id).with_name(home.log("env", run_id).name + ".1").write_text("older")
    (home.checks / f"{run_id}.json").write_text("{}")


def at(day: int) -> float:
    return datetime(2026, 1, day, 12, tzinfo=UTC).timestamp()


def going(home: Home, **limits: float) -> list[str]:
    return [item.run_id for item in prune.plan(prune.survey(home), **limits).going]  # type: ignore[arg-type]


def there(home: Home) -> set[str]:
    return {path.name for path in home.runs.iterdir() if not path.name.startswith(".")}


def outcomes(home: Home, items: list[prune.Item]) -> dict[str, str]:
    with prune.alone(home):
        return {outcome.item.run_id: outcome.problem for outcome in prune.delete(home, items)}


def test_age_and_size_choose_the_oldest_first(home: Home) -> None:
    assert going(home) == []
    assert going(home, older_than=at(2)) == RUNS[:2]
    assert going(home, max_bytes=5 * MIB) == RUNS[:2]
    assert going(home, max_bytes=20 * MIB) == []
    assert going(home, max_bytes=0) == RUNS
    assert going(home, older_than=at(1), max_bytes=5 * MIB) == RUNS[:2]
    assert going(home, older_than=at(3), max_bytes=5 * MIB) == RUNS[:3]
    sizes = [item.size_bytes for item in prune.survey(home)]
    assert all(2 * MIB < size < 2.2 * MIB for size in sizes)


def test_all_of_a_deleted_run_goes_and_nothing_of_another(home: Home) -> None:
    before = {path for path in home.root.rglob("*") if "0000000b" not in str(path)}
    items = [item for item in prune.survey(home) if item.run_id == "0000000b"]
    assert outcomes(home, items) == {"0000000b": ""}
    assert set(home.root.rglob("*")) - {home.runs / ".prune.lock"} == before


def test_a_link_is_deleted_and_what_it_leads_to_stays(home: Home, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"k" * (8 * MIB))
    (home.run(RUNS[0]).dir / "link").symlink_to(outside)
    home.log("env", RUNS[0]).unlink()
    home.log("env", RUNS[0]).symlink_to(outside / "kept")
    (home.runs / "0000000e").symlink_to(outside)
    items = prune.survey(home)
    assert [item.run_id for item in items] == RUNS and items[0].size_bytes < 2.2 * MIB
    assert set(outcomes(home, items).values()) == {""}
    assert (outside / "kept").exists() and there(home) == {"0000000e"}


def test_live_and_unreadable_runs_and_drafts_stay_however_old(home: Home) -> None:
    add(home, "000000aa", 1, RunStatus.RUNNING)
    lock = locks.take(home.run("000000aa").supervisor_lock)
    assert lock
    home.run(RUNS[1]).record.write_text("{")
    draft = home.runs / ".new-000000bb" / "000000bb"
    draft.mkdir(parents=True)
    reasons = {item.run_id: item.kept_because for item in prune.survey(home)}
    assert reasons["000000aa"] == "it goes on" and "damaged" in reasons[RUNS[1]]
    assert going(home, max_bytes=0) == [RUNS[0], RUNS[2], RUNS[3]]
    everything = outcomes(home, prune.survey(home))  # even if asked to
    assert everything["000000aa"] == "in use" and "damaged" in everything[RUNS[1]]
    assert there(home) == {"000000aa", RUNS[1]} and draft.is_dir()
    lock.release()


def test_a_run_that_a_live_one_continues_stays(home: Home) -> None:
    add(home, "000000aa", 1, RunStatus.RUNNING, resumed_from=RUNS[0])
    lock = locks.take(home.run("000000aa").supervisor_lock)
    assert lock
    assert going(home, max_bytes=0) == RUNS[1:]
    lock.release()


def test_what_happens_between_the_survey_and_the_deletion_counts(home: Home) -> None:
    items = prune.survey(home)
    home.run(RUNS[0]).supervisor_lock.touch()
    copying = locks.share(home.run(RUNS[0]).supervisor_lock)
    assert copying
    record = home.run(RUNS[1]).record
    write_atomic(record, record.read_text().replace('"completed"', '"running"'))
    home.run(RUNS[2]).record.unlink()
    assert outcomes(home, items) == {
        RUNS[0]: "in use",
        RUNS[1]: "it goes on",
        RUNS[2]: "run.json is missing",
        RUNS[3]: "",
    }
    copying.release()
    assert outcomes(home, items)[RUNS[0]] == "" and there(home) == {RUNS[1], RUNS[2]}


def test_a_run_that_is_being_deleted_is_not_continued(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_LOCK_S", 0.05)
    paths = home.run(RUNS[0])
    deleting = locks.take(paths.supervisor_lock)
    assert deleting
    source = resume.Source(paths, cast(Any, None), cast(Any, None))
    with pytest.raises(ResumeError, match="being deleted"):
        resume.carry_over(source, cast(Any, None), home.run("000000aa"))
    deleting.release()
    shutil.rmtree(paths.dir)
    with pytest.raises(PreflightError, match="could not be copied"):
        resume.carry_over(source, cast(Any, None), home.run("000000aa"))


def test_a_run_whose_processes_would_not_end_stays(home: Home) -> None:
    mine = identity_of(os.getpid())
    assert mine
    record = home.run(RUNS[0]).record
    write_atomic(record, record.read_text().replace('"identity":null', f'"identity":{mine.model_dump_json()}'))
    assert going(home, max_bytes=0) == RUNS[1:]
    assert "processes of it are alive" in outcomes(home, prune.survey(home))[RUNS[0]]


def test_a_deletion_that_was_cut_short_is_ended_by_the_next(home: Home) -> None:
    home.run(RUNS[0]).dir.rename(home.runs / f".gone-{RUNS[0]}")
    with prune.alone(home):
        assert not (home.runs / f".gone-{RUNS[0]}").exists()
        assert not list(home.logs.glob(f"*{RUNS[0]}*"))
        with pytest.raises(PreflightError, match="Another process"), prune.alone(home):
            pass
    assert there(home) == set(RUNS[1:])


def test_a_file_that_cannot_be_deleted_is_named_and_stops_no_other(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == RUNS[0]:
            raise PermissionError(13, "Permission denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    found = outcomes(home, prune.survey(home))
    assert "Permission denied" in found[RUNS[0]]
    assert there(home) == {RUNS[0]}

"""A run's last words find room on a full disk; a real small file system is filled for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_run_state import create

from hermes_rl_mcp.contracts.runs import Event, RunStatus
from hermes_rl_mcp.files import append_line
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs import reserve
from hermes_rl_mcp.runs.state import RunState, read_record

S = RunStatus


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def paths(small_disk: Path) -> RunPaths:
    paths = Home(small_disk).run("0123abcd")
    paths.dir.mkdir(parents=True)
    reserve.make(paths.reserve)
    return paths


def fill(folder: Path) -> None:
    """To the last byte."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError as error:
            assert reserve.is_full(error)


def events(paths: RunPaths) -> list[Event]:
    return [Event.model_validate_json(line) for line in paths.events.read_text().splitlines()]


def test_fi_21_the_closing_record_is_written_on_a_full_disk_with_its_event(paths: RunPaths, small_disk: Path) -> None:
    state = create(paths, S.RUNNING)
    fill(small_disk)
    state.move(S.FAILED, "disk full", error="The disk is full.")
    record = read_record(paths)
    assert (record.status, record.error, record.revision) == (S.FAILED, "The disk is full.", 2)
    assert [event.reason for event in events(paths)] == ["created", "disk full"]
    assert not paths.reserve.exists() and paths.record.stat().st_mode & 0o077 == 0


def test_fi_21_whoever_fills_the_disk_meanwhile_cannot_prevent_it(
    paths: RunPaths, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = create(paths, S.RUNNING)
    fill(small_disk)
    real = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: (real(fd, size), fill(small_disk)))
    state.move(S.FAILED, "disk full")
    assert read_record(paths).status is S.FAILED


def test_fi_21_what_finds_no_room_before_goes_with_the_closing_record(paths: RunPaths, small_disk: Path) -> None:
    state = create(paths, S.RUNNING)
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        state.update(detail="x" * 10_000)
    with pytest.raises(OSError, match="No space"):
        state.move(S.STOPPING, "asked", detail="x" * 10_000)
    assert (state.record.status, read_record(paths).status) == (S.RUNNING, S.RUNNING)
    state.begin_end()
    state.move(S.STOPPING, "asked", stop_reason="asked")
    assert read_record(paths).status is S.RUNNING and state.record.status is S.STOPPING
    state.move(S.STOPPED, "asked")
    assert read_record(paths) == state.record and state.record.stop_reason == "asked"
    found = events(paths)
    assert [event.status for event in found][-1] is S.STOPPED
    assert [event.seq for event in found] == list(range(1, len(found) + 1))


def test_fi_21_a_close_that_fails_leaves_no_event_and_can_be_repeated(paths: RunPaths, small_disk: Path) -> None:
    create(paths, S.RUNNING)
    paths.reserve.unlink()
    fill(small_disk)
    paths.events.write_text(paths.events.read_text())  # its page has room, so that only the record fails
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            RunState.load(paths).move(S.INTERRUPTED, "supervisor gone")
        assert [event.reason for event in events(paths)] == ["created"] and read_record(paths).status is S.RUNNING
    (small_disk / "filler").unlink()
    RunState.load(paths).move(S.INTERRUPTED, "supervisor gone")
    assert [event.status for event in events(paths)] == [S.RUNNING, S.INTERRUPTED]


def test_a_line_that_does_not_fit_is_not_written_in_part(small_disk: Path) -> None:
    path = small_disk / "lines"
    append_line(path, "first")
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        append_line(path, "x" * 100_000)
    assert path.read_text() == "first\n"


def test_a_reserve_that_cannot_be_had_leaves_nothing(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(OSError, match="No space"):
        reserve.make(small_disk / "reserve")
    assert not (small_disk / "reserve").exists()


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("OSError: [Errno 28] No space left on device: 'metrics.jsonl'", True),
        ("[Errno 122] Disk quota exceeded", True),
        ("The checkpoint of step 3 could not be written: the disk is full.", True),
        ("no space between words", False),
    ],
)
def test_a_full_disk_is_known_by_its_words(text: str, full: bool) -> None:
    assert reserve.says_full(text) is full

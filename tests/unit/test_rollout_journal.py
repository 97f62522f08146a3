"""The journal file: every event comes back as it was, damage is cut off, long trained groups leave it."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.rollout_api import events, journal
from hermes_rl_mcp.rollout_api.groups import Group
from hermes_rl_mcp.rollout_api.journal import Journal
from hermes_rl_mcp.rollout_api.journal_lines import encode
from hermes_rl_mcp.rollout_api.rollouts import Rollouts

REGISTRATION = Registration(
    wandb_group="g",
    wandb_project="п",
    batch_size=4,
    max_token_len=64,
    checkpoint_dir="../x",
    save_checkpoint_interval=1,
    starting_step=0,
    num_steps=5,
)
ENV = RegisterEnv(max_token_length=64, desired_name="a", weight=0.5, group_size=4, min_batch_allocation=0.25)
RAW = b'{"tokens":[[1]],"data":["],\\u000a"]}'
EVERY_KIND: list[events.Event] = [
    events.Registered(REGISTRATION, 2**127 + 1, 3),
    events.Started(),
    events.EnvRegistered(ENV, "a_0"),
    events.EnvDisconnected(0),
    events.Submitted("d1", (events.Placed(0, Group(RAW, 4, 0), False), events.Placed(1, Group(b"{}", 1, None), True))),
    events.Submitted("d2", ()),
    events.Released(0, (1, 2)),
    events.HandedOut("b", True, (0,)),
    events.Returned("b"),
    events.Written("b"),
    events.Acknowledged("b"),
    events.Acknowledged("c", retain=True),
    events.Kept("c", 7, (3, 4)),
    events.Forgotten(7),
    events.Submitted("d3", (events.Placed(2, Group(RAW, 4, 0, begun=17, allowed=1), False),)),
    events.Expired((2, 5)),
    events.Counted(7, 8, 9, ("b", "c")),
    events.Reset(),
]


def read(path: Path) -> list[events.Event]:
    opened = Journal(path)
    try:
        return list(opened.read())
    finally:
        opened.close()


def write(path: Path, *several: events.Event) -> None:
    opened = Journal(path)
    list(opened.read())
    for event in several:
        opened.append(event)
    opened.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_files(path: Path) -> int:
    """Descriptors of this process that lead to that file, also if it is deleted."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(path))
    return found


def test_every_kind_of_event_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "j.jsonl", *EVERY_KIND)
    assert read(tmp_path / "j.jsonl") == EVERY_KIND
    assert {type(event) for event in EVERY_KIND} == set(events.Event.__args__)


def test_every_line_is_one_json_object_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j.jsonl"
    write(path, *EVERY_KIND)
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert kinds[:2] == ["journal", "registered"] and len(kinds) == len(EVERY_KIND) + 1
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j.jsonl"
    write(path, *EVERY_KIND[:5])
    path.write_bytes(path.read_bytes()[:-cut])
    assert read(path) == EVERY_KIND[:4]
    write(path, EVERY_KIND[6])
    assert read(path) == [*EVERY_KIND[:4], EVERY_KIND[6]]


def test_damage_in_the_middle_ends_the_journal_there_and_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, *EVERY_KIND)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b"[[1]]", b"[[2]]")
    path.write_bytes(b"".join(lines))
    assert read(path) == EVERY_KIND[:4]
    assert (tmp_path / "j.damaged").read_bytes() == b"".join(lines[5:])


def signed(body: bytes) -> bytes:
    return b'{"crc":"%08x",' % zlib.crc32(body) + body


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (signed(b'"kind":"journal","version":99}\n'), "version 99"),
        (signed(b'"kind":"startle"}\n'), "startle"),
        (signed(b'"kind":"started","why":1}\n'), "other fields"),
        (signed(b'"kind":"released","env":1}\n'), "other fields"),
    ],
)
def test_a_journal_of_a_later_version_is_refused_and_left_as_it_is(tmp_path: Path, line: bytes, what: str) -> None:
    path = tmp_path / "j.jsonl"
    write(path, *EVERY_KIND[:3])
    path.write_bytes(path.read_bytes() + line + b"".join(encode(EVERY_KIND[4])))
    before = path.read_bytes()
    with pytest.raises(PreflightError, match=what):
        read(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["j.jsonl"]


def test_a_journal_without_a_head_is_read_and_gets_none(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"".join(encode(EVERY_KIND[0])))
    write(path, EVERY_KIND[1])
    assert read(path) == EVERY_KIND[:2]
    assert b'"journal"' not in path.read_bytes()


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"crc":"', b"\0" * 100 + b"\n"])
def test_what_a_power_cut_leaves_at_the_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "j.jsonl"
    write(path, *EVERY_KIND[:4])
    path.write_bytes(path.read_bytes() + tail)
    assert read(path) == EVERY_KIND[:4] and read(path) == EVERY_KIND[:4]


def test_one_process_at_a_time_holds_the_file(tmp_path: Path) -> None:
    first = Journal(tmp_path / "j.jsonl")
    with pytest.raises(PreflightError, match="in use"):
        Journal(tmp_path / "j.jsonl")
    first.close()
    Journal(tmp_path / "j.jsonl").close()


def test_an_event_that_cannot_be_written_whole_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    opened = Journal(path)
    opened.append(EVERY_KIND[0])
    write_some, calls = os.write, []

    def failing(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return write_some(fd, data[:5])

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(OSError, match="No space left"):
        opened.append(EVERY_KIND[4])
    monkeypatch.undo()
    opened.append(EVERY_KIND[5])
    opened.close()
    assert read(path) == [EVERY_KIND[0], EVERY_KIND[5]]


class VirtualTime(Journal):
    """A journal whose clock stands still but for its waits and its syncs; appends happen in between, when due."""

    def __init__(self, path: Path, appends: list[float], sync_s: float) -> None:
        self.now = 0.0
        self.due = sorted(appends)
        self.sync_s = sync_s
        self.written: list[float] = []
        self.syncs: list[tuple[float, int]] = []
        """When each sync began, and how many events it covers."""
        super().__init__(path, clock=lambda: self.now)

    def live(self) -> None:
        """Until everything was appended and synced."""
        self._unsynced.wait = self._until_written  # type: ignore[method-assign,assignment]
        self._sync_often()

    def _until_written(self) -> None:
        if not self._unsynced.is_set():
            if not self.due:
                self.now += 60
                self._closing.set()
                return
            self._pass(max(0.0, self.due[0] - self.now))

    def _sync(self) -> None:
        self.syncs.append((self.now, len(self.written)))
        self._pass(self.sync_s)

    def _pause(self, seconds: float) -> None:
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due and self.due[0] <= end:
            self.now = self.due.pop(0)
            self.append(events.Started())
            self.written.append(self.now)
        self.now = end


@pytest.mark.parametrize("sync_s", [0.0, 0.03, 0.09])
@pytest.mark.parametrize(
    "appends",
    [
        pytest.param([step / 500 for step in range(2000)], id="under load"),
        pytest.param([1.0, 7.0], id="idle before and after"),
        pytest.param([1.0, 1.0001, 1.0301, 1.1, 1.2005, 1.2999], id="just missed"),
        pytest.param([1.0, 1.02], id="while a sync goes on, then nothing more"),
    ],
)
def test_a_sync_begins_within_100_ms_of_every_append(tmp_path: Path, appends: list[float], sync_s: float) -> None:
    journal = VirtualTime(tmp_path / "j.jsonl", appends, sync_s)
    journal.live()
    assert len(journal.written) == len(appends)
    for number, written in enumerate(journal.written, 1):
        began = min(began for began, covered in journal.syncs if covered >= number)
        assert began - written <= 0.1 + 1e-9, (written, began)
    assert len(journal.syncs) <= 4 + 10 * appends[-1], "no more often than that"
    journal.close()


def test_events_reach_the_disk_soon_after_they_were_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[float] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    opened = Journal(tmp_path / "j.jsonl")
    opened.start()
    for event in EVERY_KIND[:3]:
        opened.append(event)
        size = os.path.getsize(tmp_path / "j.jsonl")
        wait_until(lambda size=size: bool(synced) and synced[-1] == size)  # type: ignore[misc]
    opened.close()


@pytest.mark.parametrize("count", [1, 3])
def test_events_reach_the_disk_while_the_journal_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    synced: list[int] = []
    fdatasync, fsync, go = os.fdatasync, os.fsync, threading.Event()

    def slow(fd: int) -> None:
        assert go.wait(20)
        fsync(fd)

    def noted(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fdatasync(fd)

    path = tmp_path / "j.jsonl"
    opened = Journal(path)
    opened.append(EVERY_KIND[0])
    opened.start()
    old = path.stat().st_ino
    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(os, "fdatasync", noted)
    opened.rewrite(EVERY_KIND[:1])
    for event in EVERY_KIND[1 : 1 + count]:
        before = len(synced)
        opened.append(event)
        wait_until(lambda before=before: synced[before:] == [old])  # type: ignore[misc]
    go.set()
    wait_until(lambda: path.stat().st_ino != old and opened._since_snapshot is None)
    assert synced[-1] != old, "what came meanwhile is on disk in the new file before it takes the place of the old one"
    opened.close()
    assert read(path) == EVERY_KIND[: 1 + count]


def test_a_rewrite_that_fails_keeps_the_journal_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "j.jsonl"
    opened = Journal(path)
    opened.append(EVERY_KIND[0])
    opened.start()
    monkeypatch.setattr(os, "replace", full)
    opened.rewrite(EVERY_KIND[:3])
    wait_until(lambda: opened._since_snapshot is None)
    monkeypatch.undo()
    opened.append(EVERY_KIND[1])
    wait_until(lambda: open_files(path.with_suffix(".new")) == 0)
    assert os.listdir(tmp_path) == ["j.jsonl"]
    opened.close()
    assert read(path) == EVERY_KIND[:2]


def test_a_long_run_keeps_its_journal_small_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "REWRITE_BYTES", 20_000)
    monkeypatch.setattr(journal, "SYNC_INTERVAL_S", 0.001)
    path = tmp_path / "j.jsonl"
    opened = Journal(path)
    rollouts = Rollouts(journal=opened)
    rollouts.register(REGISTRATION)
    for tag in range(400):
        rollouts.submit([Group(b'{"tag":%d,"pad":"%s"}' % (tag, b"x" * 300), 4, None)], str(tag))
        if tag >= 5:
            batch = rollouts.hand_out(leased=True)
            assert batch
            rollouts.acknowledge(batch.batch_id)
        if tag % 20 == 0:  # in between, events come while the file is rewritten
            wait_until(lambda: opened._since_snapshot is None)
    assert path.stat().st_size == opened._size < 60_000
    opened.close()
    assert not path.with_suffix(".new").exists()
    again = Journal(path)
    restored = Rollouts(journal=again)
    assert restored.state.step == 395
    assert [json.loads(group.raw)["tag"] for group in restored.state.queue.values()] == list(range(395, 400))
    assert restored.state.received == 400 and restored.state.next_seq == rollouts.state.next_seq
    again.close()

"""The journal file: every event comes back as it was, damage is cut off, long trained groups leave it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.rollout_api import events, journal
from hermes_rl_mcp.rollout_api.groups import Group
from hermes_rl_mcp.rollout_api.journal import Journal, decode, encode
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


def test_every_kind_of_event_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "j.jsonl", *EVERY_KIND)
    assert read(tmp_path / "j.jsonl") == EVERY_KIND
    assert {type(event) for event in EVERY_KIND} == set(events.Event.__args__)


def test_every_line_is_one_json_object_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j.jsonl"
    write(path, *EVERY_KIND)
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
    assert kinds[0] == "registered" and len(kinds) == len(EVERY_KIND)
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
    lines[4] = lines[4].replace(b"[[1]]", b"[[2]]")
    path.write_bytes(b"".join(lines))
    assert read(path) == EVERY_KIND[:4]
    assert (tmp_path / "j.damaged").read_bytes() == b"".join(lines[4:])


def test_a_line_of_a_later_version_is_not_misread() -> None:
    line = b"".join(encode(events.Started())).replace(b"started", b"startle")
    crc = journal.zlib.crc32(line[journal._PREFIX_LENGTH :])
    with pytest.raises(ValueError, match="startle"):
        decode(journal._PREFIX % crc + line[journal._PREFIX_LENGTH :])


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


def test_a_rewrite_that_fails_keeps_the_journal_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "j.jsonl"
    opened = Journal(path)
    opened.append(EVERY_KIND[0])
    opened.start()
    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "replace", full)
    opened.rewrite(EVERY_KIND[:3])
    wait_until(lambda: opened._since_snapshot is None)
    monkeypatch.undo()
    opened.append(EVERY_KIND[1])
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == files)
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

"""A disk that is full under the rollout API's journal: it says so, loses nothing, and goes on when there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_rig import RolloutServer, group, running
from small_disk import SmallDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture
def api(tmp_path: Path, disk: SmallDisk) -> Iterator[RolloutServer]:
    with running(tmp_path, "--journal", str(disk.folder / "journal.jsonl")) as server:
        yield server


def refused(api: RolloutServer, method: str, path: str, **request: object) -> None:
    reply = api.client.request(method, path, **request)  # type: ignore[arg-type]
    assert reply.status_code == 503, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    assert "No space left on device" in reply.json()["detail"] and "nothing was stored" in reply.json()["detail"]


def test_fi_21_a_full_disk_under_the_journal_refuses_clearly_loses_nothing_and_goes_on_with_room(
    api: RolloutServer, disk: SmallDisk
) -> None:
    api.register()
    for tag in range(4):
        api.post(group(tag, length=2000))
    in_training = api.batch(lease=True)
    delivered = api.tags()
    disk.fill()
    whole = (disk.folder / "journal.jsonl").read_bytes()

    refused(api, "POST", "/scored_data", json=group(9, length=2000))
    refused(api, "POST", "/scored_data_list", json=[group(10, length=2000), group(11, length=2000)])
    assert api.client.get("/health").json()["queue_size"] == 0
    assert api.step() == 1
    journal = (disk.folder / "journal.jsonl").read_bytes()
    assert journal == whole, "what could not be written whole left no trace"

    disk.free()
    api.post(group(9, length=2000))  # the environment's next try
    api.post(group(12))
    assert api.client.post("/acknowledge", json={"lease_id": in_training["lease_id"]}).status_code == 200
    api.kill_and_restart()
    assert delivered == [2, 3] and api.step() == 2
    assert api.tags() == [9, 12] and api.tags() is None

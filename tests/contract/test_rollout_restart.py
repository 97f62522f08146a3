"""A killed rollout API goes on where it was: nothing it answered for is lost, nothing acknowledged comes again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rollout_rig import RolloutServer, env_registration, group, run_of_tags, running, tag_of


@pytest.fixture
def api(tmp_path: Path) -> Iterator[RolloutServer]:
    with running(tmp_path, "--journal", str(tmp_path / "journal.jsonl")) as server:
        yield server


def _wait_until_delivered(journal: Path, batches: int) -> None:
    """A client has the answer a moment before the server has noted that it was written; killed in between, the server
    rightly hands the batch out again."""
    deadline = time.monotonic() + 60
    while (noted := journal.read_bytes().count(b'"written"')) < batches:
        assert time.monotonic() < deadline, f"{noted} of {batches} answers noted"
        time.sleep(0.01)


def test_everything_is_there_again_after_a_kill(api: RolloutServer, tmp_path: Path) -> None:
    trainer = api.register()
    env_id = api.register_env(group_size=4)
    gone = api.register_env(group_size=4)
    api.client.post("/disconnect-env", json={"env_id": gone})
    for tag in range(9):
        api.post(group(tag, env_id=env_id))
    assert api.tags() == [0, 1]
    acknowledged = api.batch(lease=True)["lease_id"]
    api.client.post("/acknowledge", json={"lease_id": acknowledged})
    leased = api.batch(lease=True)
    api.post(group(20, size=3, env_id=env_id))
    status = api.client.get("/status-env", params={"env_id": env_id}).json()
    latest = api.client.get("/latest_example").json()

    api.kill_and_restart()
    assert api.client.get("/status-env", params={"env_id": env_id}).json() == status
    assert api.client.get("/latest_example").json() == latest
    assert api.client.get("/health").json()["environments"] == 1
    assert api.client.get("/info").json()["batch_size"] == 8
    assert api.register() == trainer
    leased = api.batch(lease=True)
    assert [item["tokens"][0][0] for item in leased["batch"]] == [4, 5]
    assert api.client.post("/acknowledge", json={"lease_id": acknowledged}).status_code == 200
    api.kill_and_restart()
    assert api.client.post("/acknowledge", json={"lease_id": leased["lease_id"]}).status_code == 200
    assert api.step() == 3
    assert api.post(group(21, size=1, env_id=env_id)) == {"status": "buffered", "buffer_size": 0}
    assert api.tags() == [6, 7]
    assert api.tags() == [8, 20, 21]
    _wait_until_delivered(tmp_path / "journal.jsonl", batches=3)
    api.kill_and_restart()
    assert api.tags() is None and api.step() == 5


def test_a_repeated_post_across_a_restart_is_stored_once(api: RolloutServer) -> None:
    api.register()
    several = [group(1), group(2)]
    api.client.post("/scored_data_list", json=several)
    api.kill_and_restart()
    assert api.client.post("/scored_data_list", json=several).json()["groups_processed"] == 2
    assert api.client.get("/status").json()["queue_size"] == 2


def test_a_reset_is_remembered(api: RolloutServer) -> None:
    api.register()
    api.post(group(1))
    api.client.get("/reset_data")
    api.kill_and_restart()
    assert api.client.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert api.client.get("/info").json()["batch_size"] == -1


def train(api: RolloutServer, count: int) -> list[list[int]]:
    """Batches as our trainer takes them: acknowledged, and kept until a checkpoint."""
    taken = []
    for _ in range(count):
        reply = api.batch(lease=True)
        body = {"lease_id": reply["lease_id"], "retain": True}
        assert api.client.post("/acknowledge", json=body).json() == {"status": "success"}
        taken.append([tag_of(item) for item in reply["batch"]])
    return taken


def test_a_resumed_trainer_gets_the_batches_behind_its_checkpoint_again_then_those_in_training_then_the_queue(
    api: RolloutServer, tmp_path: Path
) -> None:
    api.register()
    for tag, size in enumerate([3, 4, 4, 5, 4, 4, 4, 4]):
        api.post(group(tag, size=size))
    taken = train(api, 2)
    assert taken == [[0, 3], [1, 2]]
    reply = api.client.post("/checkpointed", json={"step": 1})
    assert (reply.status_code, reply.json()) == (200, {"status": "success"})
    in_training = api.tags(lease=True)
    api.kill_and_restart()
    assert api.step() == 2
    api.register(starting_step=1, checkpoint_dir="the resumed run's")
    assert api.client.get("/status").json() == {"current_step": 1, "queue_size": 6}
    api.kill_and_restart()  # also between the two
    assert train(api, 3) == [[1, 2], in_training, [6, 7]]
    assert api.step() == 4
    api.kill_and_restart()
    api.register(starting_step=2, checkpoint_dir="once more")
    again = api.batch(lease=True)
    assert [tag_of(item) for item in again["batch"]] == in_training
    assert api.tags(lease=True) == [6, 7] and api.tags(lease=True) is None


def test_an_environment_of_the_time_before_the_restart_counts_once_it_is_heard_of(api: RolloutServer) -> None:
    api.register()
    for _ in range(2):
        api.register_env(desired_name="alive")
    api.kill_and_restart()
    assert api.client.get("/health").json()["environments"] == 0
    assert api.client.get("/status-env", params={"env_id": 1}).status_code == 200
    assert api.client.get("/health").json()["environments"] == 1
    # The one that was not heard of is gone; its successor goes on under its name.
    names = [api.client.post("/register-env", json=env_registration(desired_name="alive")).json() for _ in range(2)]
    assert [(reply["env_id"], reply["wandb_name"]) for reply in names] == [(2, "alive_0"), (3, "alive_2")]


def test_what_a_checkpoint_covers_does_not_come_again_after_a_kill(api: RolloutServer) -> None:
    api.register(batch_size=4)
    for tag in range(4):
        api.post(group(tag))
    train(api, 3)
    api.client.post("/checkpointed", json={"step": 2})
    api.kill_and_restart()
    api.register(batch_size=4, starting_step=0, checkpoint_dir="another")
    assert run_of_tags(api) == [2, 3]
    assert api.client.post("/checkpointed", json={}).status_code == 422


def test_what_was_answered_before_a_kill_under_load_is_there_after_it(api: RolloutServer) -> None:
    """Posting goes on while the server is killed: every answered group comes out, in order, exactly once."""
    api.register(batch_size=4)
    answered: list[int] = []
    enough = threading.Event()

    def post() -> None:
        with httpx.Client(base_url=str(api.client.base_url), timeout=30) as web:
            for tag in range(100_000):
                try:
                    reply = web.post("/scored_data", json=group(tag, length=400))
                except httpx.HTTPError:
                    return
                assert reply.status_code == 200
                answered.append(tag)
                if len(answered) == 60:
                    enough.set()

    poster = threading.Thread(target=post)
    poster.start()
    assert enough.wait(100)
    assert api.process
    api.process.kill()
    api.process.wait(10)
    poster.join(60)
    assert not poster.is_alive()
    api.start()
    found = run_of_tags(api)
    assert found[: len(answered)] == answered
    assert len(found) <= len(answered) + 1  # one may be stored whose answer did not get out
    assert max(Counter(found).values()) == 1


def test_a_torn_last_line_is_cut_off_and_the_rest_kept(api: RolloutServer, tmp_path: Path) -> None:
    api.register(batch_size=4)
    api.post(group(1))
    api.post(group(2))
    api.end(9)
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-40])
    api.start()
    api.post(group(3))
    api.kill_and_restart()
    assert run_of_tags(api) == [1, 3]


def test_a_second_server_on_the_same_journal_is_refused(api: RolloutServer, tmp_path: Path) -> None:
    second = RolloutServer(tmp_path / "second.log", *api.arguments)
    with pytest.raises(AssertionError, match="in use by another rollout API"):
        second.start()
    second.close()
    assert api.client.get("/health").status_code == 200

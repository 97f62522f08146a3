"""Questions that the rollout API holds back until there is news. Nobody waits who did not ask to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_rig import RolloutServer, group, running

LONG_S = 50.0
"""Nothing here takes nearly so long."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[RolloutServer]:
    with running(tmp_path) as server:
        server.register()
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def _batch(api: RolloutServer, wait_s: float = LONG_S) -> dict[str, Any]:
    return dict(api.client.get("/batch", params={"lease": 1, "wait_s": wait_s}).json())


def _status(api: RolloutServer, env_id: int, wait_s: float = LONG_S, **more: Any) -> dict[str, Any]:
    report = {"env_id": env_id, "max_batches_offpolicy": 0, "last_step": 9, "wait_s": wait_s, "known_step": 0, **more}
    return dict(api.client.get("/status-env", params={"env_id": env_id, "report": json.dumps(report)}).json())


def _asked(question: Future[dict[str, Any]]) -> None:
    """It has arrived, and is not answered."""
    time.sleep(0.2)
    assert not question.done()


def test_a_batch_is_answered_as_soon_as_it_is_complete(api: RolloutServer, pool: ThreadPoolExecutor) -> None:
    began = time.monotonic()
    question = pool.submit(_batch, api)
    _asked(question)
    api.post(group(1))
    _asked(question)
    api.post(group(2))
    reply = question.result(LONG_S)
    assert len(reply["batch"]) == 2 and reply["lease_id"]
    assert time.monotonic() - began < LONG_S / 2


def test_there_is_no_batch_when_the_time_is_over(api: RolloutServer) -> None:
    began = time.monotonic()
    assert _batch(api, wait_s=0.3) == {"batch": None, "lease_id": None}
    assert time.monotonic() - began >= 0.3


def test_who_does_not_ask_to_wait_is_answered_at_once(api: RolloutServer) -> None:
    assert api.client.get("/batch", timeout=LONG_S).json() == {"batch": None}


@pytest.mark.parametrize("wait_s", ["-1", "nan", "inf", "61", "soon"])
def test_a_time_that_is_none_is_refused(api: RolloutServer, wait_s: str) -> None:
    assert api.client.get("/batch", params={"wait_s": wait_s}).status_code == 422


def test_an_environment_without_room_is_answered_when_the_batch_is_acknowledged(
    api: RolloutServer, pool: ThreadPoolExecutor
) -> None:
    env_id = api.register_env()
    assert _status(api, env_id, wants=8)["room"] == 2
    begun = [{"step": 0, "begun": 2}]
    for tag in (1, 2):
        api.post(group(tag, env_id=env_id, group_overrides={"begun_step": 0, "max_batches_offpolicy": 0}))
    lease = _batch(api)["lease_id"]
    question = pool.submit(_status, api, env_id, wants=8, groups=begun)
    _asked(question)
    api.client.post("/acknowledge", json={"lease_id": lease})
    reply = question.result(LONG_S)
    assert (reply["current_step"], reply["room"]) == (1, 2)


def test_the_strictest_wish_holds_for_all_as_soon_as_it_is_registered(api: RolloutServer) -> None:
    tolerant = api.register_env(max_batches_offpolicy=2)
    assert _status(api, tolerant, wants=8, max_batches_offpolicy=2, known_step=None, wait_s=0)["room"] == 4
    api.client.post("/disconnect-env", json={"env_id": tolerant})
    tolerant = api.register_env(max_batches_offpolicy=2)
    api.register_env(max_batches_offpolicy=0)  # and says nothing yet
    assert _status(api, tolerant, wants=8, max_batches_offpolicy=2, known_step=None, wait_s=0)["room"] == 1


def test_a_report_that_is_none_or_of_somebody_else_is_refused(api: RolloutServer) -> None:
    env_id = api.register_env()
    for report in ("{", json.dumps({"env_id": env_id}), json.dumps({"env_id": 7, "max_batches_offpolicy": 1})):
        asked = api.client.get("/status-env", params={"env_id": env_id, "report": report})
        assert asked.status_code == 422, report


def test_a_client_that_goes_away_while_it_waits_takes_no_batch_with_it(
    api: RolloutServer, pool: ThreadPoolExecutor
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        api.client.get("/batch", params={"lease": 1, "wait_s": LONG_S}, timeout=0.3)
    for tag in (1, 2):
        api.post(group(tag))
    assert len(_batch(api, wait_s=1)["batch"]) == 2


def test_the_end_of_the_server_ends_every_wait(api: RolloutServer) -> None:
    with api.raw() as connection:
        connection.sendall(b"GET /batch?lease=1&wait_s=50 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(2):  # a question that comes later is answered later: then the server has that one, too
            assert api.client.get("/status").status_code == 200
        assert api.end() == 0
        answer = connection.recv(1 << 16)
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"batch": None, "lease_id": None}


def test_groups_of_odd_sizes_that_never_add_up_do_not_end_the_last_batch(api: RolloutServer) -> None:
    """Batches of eight: of six sequences the last group of four would make too many, nine cannot be split."""
    env_id = api.register_env()
    notes = {"begun_step": 0, "max_batches_offpolicy": 0, "group_size": 3}
    for tag in (1, 2, 3):
        api.post(group(tag, size=3, env_id=env_id, group_overrides=notes))
        if tag > 1:
            assert _status(api, env_id, wants=8, last_step=1, groups=[], known_step=None, wait_s=0)["room"] == 1

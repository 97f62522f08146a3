"""What the rollout API refuses: with a clear 4xx that names the place, and nothing stored."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rollout_rig import RolloutServer, env_registration, group, registration, running

NAN, INF = float("nan"), float("inf")
ROW = [-0.5, -0.5, -0.5]
TAUGHT, VALUES = [[], [7, 8], []], [[], [-1.0, -2.0], []]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    with running(tmp_path_factory.mktemp("api"), "--queue-limit-mib", "8") as server:
        yield server


@pytest.fixture
def api(server: RolloutServer) -> RolloutServer:
    server.client.get("/reset_data")
    server.register()
    return server


FAULTY: list[tuple[dict[str, Any], list[str | int]]] = [
    ({"scores": [0.0, 1.0, NAN, 0.0]}, ["scores", 2]),
    ({"scores": [0.0, 1.0, 0.0, -INF]}, ["scores", 3]),
    ({"scores": [0.0, 1.0, 0.0]}, ["scores"]),
    ({"inference_logprobs": [ROW, ROW, [1.0, NAN, -1.0], ROW]}, ["inference_logprobs", 2, 1]),
    ({"inference_logprobs": [ROW, ROW, ROW, ROW[:2]]}, ["inference_logprobs", 3]),
    ({"inference_logprobs": [ROW] * 3}, ["inference_logprobs"]),
    ({"inference_logprobs": [[], [], [], []]}, ["inference_logprobs", 0]),
    ({"advantages": [ROW, ROW, ROW, [0.1] * 4]}, ["advantages", 3]),
    ({"advantages": [ROW, [0.1, 0.1, INF], ROW, ROW]}, ["advantages", 1, 2]),
    ({"ref_logprobs": [ROW, ROW, ROW, ROW, ROW]}, ["ref_logprobs"]),
    ({"distill_logprobs": [[[NAN]]] * 4}, ["distill_logprobs", 0, 0, 0]),
    ({"distill_token_ids": [TAUGHT] * 4}, ["distill_logprobs"]),
    ({"distill_token_ids": [TAUGHT] * 3, "distill_logprobs": [VALUES] * 4}, ["distill_token_ids"]),
    ({"distill_token_ids": [[]] * 3 + [TAUGHT[:2]], "distill_logprobs": [[]] * 4}, ["distill_token_ids", 3]),
    ({"distill_token_ids": [TAUGHT] * 4, "distill_logprobs": [VALUES] * 3 + [[]]}, ["distill_logprobs", 3]),
    (
        {"distill_token_ids": [TAUGHT] * 4, "distill_logprobs": [VALUES, [[], [-1.0], []], VALUES, VALUES]},
        ["distill_logprobs", 1, 1],
    ),
    ({"masks": [[-100, 100, 101]] * 3}, ["masks"]),
    ({"masks": [[-100, 100, 101], [-100, 101, 102], [-100, 102], [-100, 103, 104]]}, ["masks", 2]),
    ({"masks": [[0, 100, 101]] + [[-100] * 3] * 3}, ["masks", 0, 0]),
    ({"masks": [[-100] * 3, [-100, 101, 7]] + [[-100] * 3] * 2}, ["masks", 1, 2]),
    ({"tokens": [], "masks": [], "scores": []}, ["tokens"]),
    ({"tokens": [[]], "masks": [[]], "scores": [1.0], "inference_logprobs": None}, ["tokens", 0]),
    ({"tokens": "abc"}, ["tokens"]),
    ({"env_id": -1}, ["env_id"]),
    ({"overrides": [{}]}, ["overrides"]),
    ({"overrides": [{"reward_parts": {"a": NAN}}, {}, {}, {}]}, ["overrides", 0, "reward_parts", "a"]),
    ({"generation_params": {"temperature": INF}}, ["generation_params", "temperature"]),
    ({"messages": [[{"role": "user", "content": "x"}, {"role": "user"}]]}, ["messages", 0, 1]),
    ({"messages": [[{"content": "x"}]]}, ["messages", 0, 0]),
]


@pytest.mark.parametrize(("changes", "place"), FAULTY, ids=[".".join(map(str, place)) for _, place in FAULTY])
def test_a_faulty_group_is_refused_with_the_place_of_the_fault(
    api: RolloutServer, changes: dict[str, Any], place: list[str | int]
) -> None:
    before = api.client.get("/health").json()
    reply = api.client.post("/scored_data", content=json.dumps(group(1, **changes)))
    assert reply.status_code == 422, reply.text
    assert ["body", *place] in [fault["loc"] for fault in reply.json()["detail"]]
    after = api.client.get("/health").json()
    assert (after["queue_size"], after["groups_received"]) == (0, before["groups_received"])
    assert after["groups_rejected"] == before["groups_rejected"] + 1


def test_a_number_too_large_for_a_float_is_refused(api: RolloutServer) -> None:
    body = json.dumps(group(1)).replace('"scores": [0.0', '"scores": [1e999')
    assert api.client.post("/scored_data", content=body).status_code == 422
    body = json.dumps(group(1, generation_params={"t": 5})).replace('"t": 5', '"t": -1e999')
    assert api.client.post("/scored_data", content=body).status_code == 422


def test_one_faulty_group_of_a_list_refuses_the_whole_list_and_is_named(api: RolloutServer) -> None:
    bodies = [group(1), group(2), group(3, scores=[1.0])]
    reply = api.client.post("/scored_data_list", json=bodies)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", 2, "scores"]
    assert api.client.get("/status").json()["queue_size"] == 0


def test_refused_data_leaves_batches_and_the_latest_example_readable(api: RolloutServer) -> None:
    api.post(group(1))
    api.client.post("/scored_data", content=json.dumps(group(2, scores=[NAN] * 4)))
    api.post(group(3))
    assert api.client.get("/latest_example").json()["tokens"][0][0] == 3
    assert api.tags() == [1, 3]
    assert api.step() == 1


@pytest.mark.parametrize("group_size", [3, 16, 0, -4])
def test_an_environment_whose_groups_never_make_a_batch_is_refused(api: RolloutServer, group_size: int) -> None:
    reply = api.client.post("/register-env", json=env_registration(group_size=group_size))
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", "group_size"]
    if group_size > 0:
        assert "batch_size 8 is not a multiple of group_size" in reply.json()["detail"][0]["msg"]


def test_the_refusal_names_the_nearest_batch_sizes(api: RolloutServer) -> None:
    text = api.client.post("/register-env", json=env_registration(group_size=3)).text
    assert "6 or 9" in text


def test_a_trainer_whose_batch_does_not_fit_the_live_environments_is_refused(api: RolloutServer) -> None:
    env_id = api.register_env(group_size=4)
    reply = api.client.post("/register", json=registration(batch_size=6))
    assert reply.status_code == 422 and reply.json()["detail"][0]["loc"] == ["body", "batch_size"]
    assert api.client.get("/info").json()["batch_size"] == 8
    api.client.post("/disconnect-env", json={"env_id": env_id})
    assert api.client.post("/register", json=registration(batch_size=6)).status_code == 200


@pytest.mark.parametrize("batch_size", [0, -8, 10**9])
def test_a_batch_size_out_of_range_is_refused(api: RolloutServer, batch_size: int) -> None:
    assert api.client.post("/register", json=registration(batch_size=batch_size)).status_code == 422


def test_weights_that_are_no_numbers_are_refused(api: RolloutServer) -> None:
    api.batch()
    for field in ("weight", "min_batch_allocation"):
        body = json.dumps(env_registration(**{field: NAN}))
        assert api.client.post("/register-env", content=body).status_code == 422


def test_a_group_that_no_batch_can_hold_is_refused_and_blocks_nothing(api: RolloutServer) -> None:
    reply = api.client.post("/scored_data", json=group(1, size=16))
    assert reply.status_code == 422 and "no batch of 8" in reply.text
    api.post(group(2, size=3))  # fits no batch yet, and stays
    api.post(group(3))
    api.post(group(4))
    assert api.tags() == [3, 4]
    api.post(group(5, size=5))
    assert api.tags() == [2, 5]


def test_a_repeated_submission_is_answered_as_the_first_and_stored_once(api: RolloutServer) -> None:
    env_id = api.register_env()
    for _ in range(3):
        assert api.post(group(1, env_id=env_id)) == {"status": "received"}
    odd = group(2, size=3, env_id=env_id)
    for _ in range(2):
        assert api.post(odd) == {"status": "buffered", "buffer_size": 3}
    both = [group(3), group(4)]
    for _ in range(2):
        assert api.client.post("/scored_data_list", json=both).json()["groups_processed"] == 2
    assert api.client.get("/status").json()["queue_size"] == 3
    api.client.get("/reset_data")
    api.register()
    api.post(group(1, env_id=env_id))
    assert api.client.get("/status").json()["queue_size"] == 1


def test_a_policy_that_always_says_the_same_is_not_starved(api: RolloutServer) -> None:
    for _ in range(12):
        api.post(group(1))
    assert api.client.get("/status").json()["queue_size"] >= 2


@pytest.mark.parametrize(
    "payload",
    [b"not gzip at all", gzip.compress(b"{}")[:-4], gzip.compress(b"x" * 99)[:20]],
    ids=["no gzip", "without its end", "cut short"],
)
def test_broken_gzip_is_the_clients_fault(api: RolloutServer, payload: bytes) -> None:
    reply = api.client.post("/scored_data", content=payload, headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.text) == (400, "Invalid gzip payload")


def test_sec_08_a_body_that_inflates_without_end_is_refused(api: RolloutServer) -> None:
    bomb = gzip.compress(bytes(32 << 20), compresslevel=6) * 300  # about 10 GB from 10 MB
    reply = api.client.post("/scored_data", content=bomb, headers={"content-encoding": "gzip"})
    assert reply.status_code == 413
    assert api.client.get("/health").status_code == 200


def test_a_body_declared_too_large_is_refused_unread(api: RolloutServer) -> None:
    with api.raw() as connection:
        head = f"POST /scored_data HTTP/1.1\r\nHost: localhost:{api.port}\r\nContent-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_request_without_groups_may_not_be_large(api: RolloutServer) -> None:
    body = json.dumps(env_registration(desired_name="x" * (2 << 20))).encode()
    assert api.client.post("/register-env", content=body).status_code == 413
    headers = {"content-encoding": "gzip"}
    assert api.client.post("/register-env", content=gzip.compress(body), headers=headers).status_code == 413


def test_a_deeply_nested_body_is_refused(api: RolloutServer) -> None:
    body = json.dumps(group(1))[:-1] + ', "images": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert api.client.post("/scored_data", content=body).status_code == 422


def test_a_full_queue_first_makes_environments_pause_and_then_answers_503(api: RolloutServer) -> None:
    env_id = api.register_env(group_size=4)
    told_to_pause_at = None
    for tag in range(100):
        reply = api.client.post("/scored_data", json=group(tag, length=2500, env_id=env_id))
        if reply.status_code != 200:
            break
        status = api.client.get("/status-env", params={"env_id": env_id}).json()
        if told_to_pause_at is None and status["queue_size"] > status["self_queue_size"]:
            told_to_pause_at = tag
            assert status["queue_size"] == 100 * 8 // 4  # the rest of the training, and no more
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
    assert "queue is full" in reply.json()["detail"]
    assert told_to_pause_at is not None and told_to_pause_at < tag - 1
    assert api.tags() == [0, 1]
    assert api.client.post("/scored_data", json=group(tag, length=2500, env_id=env_id)).status_code == 200


def test_an_unknown_lease_is_not_found(api: RolloutServer) -> None:
    assert api.client.post("/acknowledge", json={"lease_id": "nothing"}).status_code == 404
    assert api.client.post("/acknowledge", json={}).status_code == 422

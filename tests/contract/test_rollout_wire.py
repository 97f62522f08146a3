"""The Atropos wire of the rollout API: every path, its shapes, texts and order of events."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_rig import RolloutServer, env_registration, group, registration, running

from hermes_rl_mcp.contracts.rollout_api import HealthReply, ScoredData

KEYS = sorted(ScoredData.model_fields)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    with running(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def api(server: RolloutServer) -> RolloutServer:
    server.client.get("/reset_data")
    return server


def test_a_fresh_server_answers_every_read_path(api: RolloutServer) -> None:
    get = api.client.get
    assert get("/").json() == {"message": "AtroposLib API"}
    assert get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert get("/wandb_info").json() == {"group": None, "project": None}
    assert get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert get("/batch").json() == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    required = ["tokens", "masks", "scores"]
    optional = ["advantages", "ref_logprobs", "generation_params", "inference_logprobs", "messages", "images"]
    assert get("/latest_example").json() == {name: [] for name in required + optional}
    health = HealthReply.model_validate(get("/health").json())
    assert (health.nonce, health.trainer_registered, health.environments) == ("", False, 0)
    assert get("/info").headers["content-type"] == "application/json"


def test_register_gives_an_integer_of_up_to_128_bits(api: RolloutServer) -> None:
    reply = api.client.post("/register", json=registration()).json()
    assert list(reply) == ["uuid"] and isinstance(reply["uuid"], int) and 2**32 < reply["uuid"] < 2**128
    assert api.client.get("/info").json() == {"batch_size": 8, "max_token_len": 512}
    assert api.client.get("/wandb_info").json() == {"group": "group", "project": "project"}


def test_registering_the_same_trainer_again_changes_nothing(api: RolloutServer) -> None:
    first = api.register()
    api.post(group(1))
    env_id = api.register_env()
    assert api.register() == first
    assert api.client.get("/status").json() == {"current_step": 0, "queue_size": 1}
    assert api.client.request("GET", "/status-env", json={"env_id": env_id}).status_code == 200


def test_another_trainer_takes_over_with_its_own_sizes_and_step(api: RolloutServer) -> None:
    first = api.register()
    api.post(group(1))
    assert api.register(batch_size=4, starting_step=7) != first
    assert api.step() == 7
    assert api.tags() == [1]


def test_environments_wait_until_the_trainer_asks_for_its_first_batch(api: RolloutServer) -> None:
    waiting = {"status": "wait for trainer to start"}
    assert api.client.post("/register-env", json=env_registration()).json() == waiting
    api.register(starting_step=3)
    assert api.client.post("/register-env", json=env_registration()).json() == waiting
    assert api.client.get("/batch").json() == {"batch": None}
    assert api.client.post("/register-env", json=env_registration()).json() == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "gsm8k_0",
        "checkpoint_dir": "checkpoints",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 100,
    }
    assert api.client.post("/register-env", json=env_registration()).json()["wandb_name"] == "gsm8k_1"
    assert api.client.post("/register-env", json=env_registration(desired_name="b")).json()["wandb_name"] == "b_0"


@pytest.mark.parametrize(
    "body", [env_registration(desired_name=None), {"max_token_length": 9, "weight": 1, "group_size": 4}]
)
def test_an_environment_without_a_name_is_called_env(api: RolloutServer, body: dict[str, Any]) -> None:
    api.register()
    api.batch()
    assert api.client.post("/register-env", json=body).json()["wandb_name"] == "env_0"


def test_disconnecting_answers_success_or_failure(api: RolloutServer) -> None:
    api.register()
    env_id = api.register_env()
    assert HealthReply.model_validate(api.client.get("/health").json()).environments == 1
    assert api.client.post("/disconnect-env", json={"env_id": env_id}).json() == {"status": "success"}
    assert HealthReply.model_validate(api.client.get("/health").json()).environments == 0
    for unknown in (5, -1):
        reply = api.client.post("/disconnect-env", json={"env_id": unknown})
        assert reply.status_code == 200 and sorted(reply.json()) == ["error", "status"]
        assert reply.json()["status"] == "failure"


def test_a_batch_always_carries_all_14_keys(api: RolloutServer) -> None:
    api.register(batch_size=4)
    sent = group(1, unknown_key=5)
    assert api.client.post("/scored_data", json=sent).json() == {"status": "received"}
    (item,) = api.batch()["batch"]
    assert sorted(item) == KEYS and len(KEYS) == 14
    assert "unknown_key" not in item
    for name in ("tokens", "masks", "scores", "inference_logprobs"):
        assert item[name] == sent[name]
    assert item["advantages"] is None and item["env_id"] is None


def test_every_optional_part_of_a_group_passes_through(api: RolloutServer) -> None:
    api.register(batch_size=2)
    turns = [
        {"role": "user", "content": None, "reward": None},
        {"role": "dog", "content": [{"type": "text", "text": '\U0001f44b Здравствуй \u0000 " \\'}], "tool_calls": [{}]},
    ]
    extra: dict[str, Any] = {
        "advantages": [[0.1, 0.2, 0.3]] * 2,
        "ref_logprobs": [[-0.1, -0.2, -1e-30]] * 2,
        "messages": [turns, turns],
        "generation_params": {"temperature": 0.7, "policy_version": 3},
        "overrides": [{"set_advantage_to_zero": True}, {"temperature": 0.5}],
        "group_overrides": {"group_size": 2},
        "images": ["aGk=", None],
        "distill_token_ids": [[[1, 2], [3, 4], [5, 6]]] * 2,
        "distill_logprobs": [[[-1.0, -2.0], [-3.5, -4.0], [-5.0, -6.0]]] * 2,
    }
    sent = group(1, size=2, **extra)
    api.post(sent)
    (item,) = api.batch()["batch"]
    for name, value in extra.items():
        assert item[name] == value, name
    assert api.client.get("/latest_example").json() == item


def test_empty_lists_mean_absent_and_older_masks_of_ones_are_taken(api: RolloutServer) -> None:
    api.register(batch_size=4)
    nothing = {name: [] for name in ("advantages", "ref_logprobs", "messages", "overrides", "images")}
    api.post(group(1, group_overrides={}, inference_logprobs=None, **nothing))
    assert api.batch()["batch"][0]["advantages"] == []
    api.post({"tokens": [[5, 6, 7]], "masks": [[1, 1, 1]], "scores": [0.5]})


def test_batches_come_first_in_first_out_one_per_call(api: RolloutServer) -> None:
    api.register()
    for tag in range(6):
        api.post(group(tag))
    assert api.tags() == [0, 1]
    assert api.client.get("/status").json() == {"current_step": 1, "queue_size": 4}
    assert api.tags() == [2, 3]
    assert api.tags() == [4, 5]
    assert api.tags() is None
    assert api.client.get("/status").json() == {"current_step": 3, "queue_size": 0}


def test_the_list_endpoint_stores_equal_groups_of_one_body_each(api: RolloutServer) -> None:
    api.register(batch_size=16)
    reply = api.client.post("/scored_data_list", json=[group(1)] * 4)
    assert reply.json() == {"status": "received", "groups_processed": 4}
    assert api.tags() == [1, 1, 1, 1]
    assert api.client.post("/scored_data_list", json=[]).json() == {"status": "received", "groups_processed": 0}


def test_groups_of_odd_size_are_buffered_until_they_add_up(api: RolloutServer) -> None:
    api.register()
    env_id = api.register_env(group_size=4)
    assert api.post(group(1, size=3, env_id=env_id)) == {"status": "buffered", "buffer_size": 3}
    assert api.post(group(2, size=2, env_id=env_id)) == {"status": "buffered", "buffer_size": 5}
    assert api.client.get("/status").json()["queue_size"] == 0
    assert api.post(group(3, size=1, env_id=env_id)) == {"status": "buffered", "buffer_size": 2}
    assert api.client.get("/status").json()["queue_size"] == 2
    several = [group(4, env_id=env_id), group(5, size=1, env_id=env_id)]
    assert api.client.post("/scored_data_list", json=several).json() == {
        "status": "received",
        "groups_processed": 2,
        "buffered": 1,
        "last_buffer_size": 3,
    }
    assert api.tags() == [1, 3, 4]


def test_a_group_larger_than_its_environments_is_used_too(api: RolloutServer) -> None:
    api.register()
    env_id = api.register_env(group_size=4)
    assert api.post(group(1, size=8, env_id=env_id)) == {"status": "received"}
    assert api.tags() == [1]


def test_buffered_groups_of_which_none_fits_one_group_fit_several(api: RolloutServer) -> None:
    api.register(batch_size=12)
    env_id = api.register_env(group_size=4)
    for tag in range(4):
        api.post(group(tag, size=3, env_id=env_id))
    assert api.tags() == [0, 1, 2, 3]


def test_status_env_takes_a_body_on_get_or_a_query(api: RolloutServer) -> None:
    api.register(num_steps=1000)
    env_id = api.register_env(group_size=4, weight=1.0)
    api.register_env(group_size=4, weight=3.0, min_batch_allocation=0.25)
    for tag, owner in enumerate((0, 0, 1, 1, 1)):
        api.post(group(tag, env_id=owner))
    expected = {
        "current_step": 0,
        "queue_size": (8 + 12 - 2) // 4,  # all but what the other's reserved share will take
        "unallocated_fraction": 0.75,
        "self_queue_size": 2,
        "max_group_size": 4,
        "env_weight": 0.25,
        "batches_out": 0,
    }
    assert api.client.request("GET", "/status-env", json={"env_id": env_id}).json() == expected
    assert api.client.get("/status-env", params={"env_id": env_id}).json() == expected


@pytest.mark.parametrize("weights", [(0.0,), (-1.0,), (0.0, -2.0), (1e308, 1e308)])
def test_status_env_survives_any_weight(api: RolloutServer, weights: tuple[float, ...]) -> None:
    api.register()
    for weight in weights:
        env_id = api.register_env(weight=weight, max_token_length=10**400)
    reply = api.client.get("/status-env", params={"env_id": env_id})
    assert reply.status_code == 200, reply.text
    assert 0.01 <= reply.json()["env_weight"] <= 1.0


def test_sec_08_status_env_refuses_what_it_does_not_know_without_an_error_of_its_own(api: RolloutServer) -> None:
    assert api.client.get("/status-env").status_code == 422
    assert api.client.get("/status-env", params={"env_id": "x"}).status_code == 422
    assert api.client.get("/status-env", params={"env_id": 0}).status_code == 404
    api.register()
    api.register_env()
    for unknown in (-1, 1, 10**30):
        assert api.client.request("GET", "/status-env", json={"env_id": unknown}).status_code == 404


def test_status_env_does_not_change_what_counts_as_a_normal_group(api: RolloutServer) -> None:
    api.register(batch_size=16)
    env_id = api.register_env(group_size=4)
    api.post(group(1, size=8, env_id=env_id))
    api.client.get("/status-env", params={"env_id": env_id})
    assert api.post(group(2, env_id=env_id)) == {"status": "received"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_reset_forgets_everything_and_a_trainer_can_register_anew(api: RolloutServer, method: str) -> None:
    api.register()
    api.post(group(1, size=8))
    api.register_env()
    api.post(group(2, env_id=0))
    reply = api.client.request(method, "/reset_data")
    assert (reply.status_code, reply.text) == (200, "Reset successful")
    assert reply.headers["content-type"].startswith("text/plain")
    assert api.client.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert api.client.get("/status").json() == {"current_step": 0, "queue_size": 0}
    assert api.client.get("/latest_example").json()["tokens"] == []
    assert api.client.get("/batch").json()["status"] == "error"
    api.post(group(3, env_id=0))  # a live environment goes on posting
    api.register(batch_size=4)
    assert api.client.get("/info").json() == {"batch_size": 4, "max_token_len": 512}
    assert api.tags() == [3]


def test_groups_that_come_before_the_trainer_are_kept(api: RolloutServer) -> None:
    api.post(group(1))
    api.post(group(2, size=16))
    api.post(group(3))
    api.register()
    assert api.tags() == [1, 3]
    assert api.client.get("/status").json()["queue_size"] == 0


def test_gzip_is_understood_and_used_when_asked_for(api: RolloutServer) -> None:
    api.register(batch_size=16)
    body = json.dumps(group(1, size=16, length=200)).encode()
    for headers, content in (({"content-encoding": "gzip"}, gzip.compress(body)), ({"content-encoding": "br"}, body)):
        api.client.get("/reset_data")
        api.register(batch_size=16)
        assert api.client.post("/scored_data", content=content, headers=headers).json() == {"status": "received"}
        with api.client.stream("GET", "/batch", headers={"accept-encoding": "gzip"}) as reply:
            wire = b"".join(reply.iter_raw())
        assert reply.headers["content-encoding"] == "gzip"
        assert json.loads(gzip.decompress(wire))["batch"][0]["tokens"] == json.loads(body)["tokens"]
    api.client.post("/scored_data", content=body)
    for accepted in ("identity", "gzip;q=0"):
        reply = api.client.get("/latest_example", headers={"accept-encoding": accepted})
        assert "content-encoding" not in reply.headers and len(reply.json()["tokens"]) == 16
    assert "content-encoding" not in api.client.get("/info", headers={"accept-encoding": "gzip"}).headers


def test_only_the_listed_methods_are_answered_and_head_takes_no_batch(api: RolloutServer) -> None:
    api.register()
    api.post(group(1, size=8))
    assert api.client.head("/batch").status_code == 405
    assert api.client.delete("/batch").status_code == 405
    assert api.client.get("/register").status_code == 405
    assert api.client.get("/nothing").status_code == 404
    assert api.client.get("/nothing").headers["content-type"] == "application/json"
    assert api.tags() == [1]


def test_a_registration_that_lacks_a_field_is_refused_with_its_place(api: RolloutServer) -> None:
    body = registration()
    del body["num_steps"]
    reply = api.client.post("/register", json=body)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", "num_steps"]


def test_sec_08_checkpoint_dir_is_handed_on_and_never_opened(api: RolloutServer, tmp_path: Path) -> None:
    target = tmp_path / "never" / ".." / "made"
    api.register(checkpoint_dir=str(target))
    api.register_env()
    assert api.client.post("/register-env", json=env_registration()).json()["checkpoint_dir"] == str(target)
    assert list(tmp_path.iterdir()) == []


def test_plain_requests_without_a_content_type_are_read(api: RolloutServer) -> None:
    reply = httpx.post(f"http://localhost:{api.port}/register", content=json.dumps(registration()).encode())
    assert reply.status_code == 200, reply.text

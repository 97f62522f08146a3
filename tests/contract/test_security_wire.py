"""Who reaches the two servers of a run, and how much one request can cost them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from rollout_rig import RolloutServer, group, registration, running
from test_rollout_guard import PREFIX, write_config
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, serving, settings

from trainer.backends.local.backend import LocalBackend

ROLLOUT_ROUTES = [
    *(("GET", path) for path in ("/", "/health", "/wandb_info", "/info", "/batch", "/latest_example", "/status")),
    *(("GET", path) for path in ("/status-env?env_id=0", "/reset_data")),
    *(("POST", path) for path in ("/register", "/register-env", "/disconnect-env", "/acknowledge", "/scored_data")),
    *(("POST", path) for path in ("/scored_data_list", "/reset_data")),
]
SAMPLER_ROUTES = [
    *(("GET", path) for path in ("/health", "/wandb_info", "/v1/models", "/docs", "/openapi.json", "/redoc")),
    *(("POST", path) for path in ("/generate", "/logprobs", "/v1/completions", "/v1/chat/completions")),
]
BROWSER = [
    {"origin": "http://127.0.0.1"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"host": "evil.example"},
]
MANY_BYTES = 10 << 30
ROOM_BYTES = 400 << 20
"""Above what a body may have inflated (128 MiB) and its copies; far below what the bomb would take."""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    folder = tmp_path_factory.mktemp("run")
    with running(folder, "--config", str(write_config(folder)), prefix=f"/{PREFIX}") as server:
        yield server


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    torch.set_num_threads(1)
    backend = LocalBackend(load_model(build_tiny_llama(tmp_path_factory.mktemp("model"))), settings())
    with serving(backend, path_prefix=PREFIX) as client:
        yield client
    backend.close()


@pytest.mark.parametrize(("method", "path"), ROLLOUT_ROUTES)
def test_sec_07_without_the_secret_prefix_no_route_of_the_rollout_api_exists(
    rollouts: RolloutServer, method: str, path: str
) -> None:
    for before in ("", "/", "/x", f"/{PREFIX[:-1]}", f"/{PREFIX}x", f"/{PREFIX.upper()}", "/../" + PREFIX[:-1]):
        reply = httpx.request(method, f"http://127.0.0.1:{rollouts.port}{before}{path}", json=registration())
        assert reply.status_code == 404
        assert PREFIX not in reply.text
    assert not rollouts.client.get("/health").json()["trainer_registered"], "the run is unaffected"


@pytest.mark.parametrize(("method", "path"), SAMPLER_ROUTES)
def test_sec_07_without_the_secret_prefix_no_route_of_the_sampler_exists(
    sampler: httpx.Client, method: str, path: str
) -> None:
    for before in ("", "/x", f"/{PREFIX}x"):
        reply = sampler.request(method, f"{before}{path}", json={"input_ids": [5]})
        assert reply.status_code == 404
        assert PREFIX not in reply.text


def test_sec_07_programs_do_not_describe_themselves_even_below_the_prefix(sampler: httpx.Client) -> None:
    assert sampler.get(f"/{PREFIX}/openapi.json").status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "PUT", "HEAD"])
@pytest.mark.parametrize("headers", BROWSER, ids=str)
def test_sec_06_no_web_page_reaches_either_server(
    rollouts: RolloutServer, sampler: httpx.Client, method: str, headers: dict[str, str]
) -> None:
    for reply in (
        rollouts.client.request(method, "/reset_data", headers=headers),
        sampler.request(method, f"/{PREFIX}/generate", headers=headers),
    ):
        assert reply.status_code == 403
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_sec_06_a_preflight_without_an_origin_gets_no_permission_either(sampler: httpx.Client) -> None:
    reply = sampler.options(f"/{PREFIX}/generate", headers={"access-control-request-method": "POST"})
    assert reply.status_code == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


def bomb() -> bytes:
    """10 GB of zeros in about 10 MB of one gzip member."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    part = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + part * (MANY_BYTES >> 20)


def test_sec_08_a_bomb_costs_the_rollout_api_no_memory(rollouts: RolloutServer) -> None:
    assert rollouts.process
    process = psutil.Process(rollouts.process.pid)
    before = process.memory_info().rss
    headers = {"content-encoding": "gzip"}
    for path in ("/scored_data", "/scored_data_list", "/register", "/register-env"):
        assert rollouts.client.post(path, content=bomb(), headers=headers).status_code == 413
    after = process.memory_info()
    assert after.rss - before < ROOM_BYTES
    peak = int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert peak - before < ROOM_BYTES
    assert rollouts.client.get("/health").status_code == 200


def test_sec_08_the_sampler_inflates_nothing(sampler: httpx.Client) -> None:
    body = gzip.compress(json.dumps({"input_ids": [5]}).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert sampler.post(f"/{PREFIX}/generate", content=body, headers=headers).status_code == 400
    before = psutil.Process().memory_info().rss
    assert sampler.post(f"/{PREFIX}/generate", content=bomb(), headers=headers).status_code == 400
    assert psutil.Process().memory_info().rss - before < ROOM_BYTES


@pytest.mark.parametrize("env_id", [-1, 10**6, 10**30, "0; drop", None, 1.5, [0]])
def test_sec_08_an_environments_number_is_one_that_was_given_out(rollouts: RolloutServer, env_id: object) -> None:
    """A negative one would index from the end."""
    body = {**group(1), "env_id": env_id}
    rollouts.register(batch_size=4)
    rollouts.register_env()
    assert rollouts.client.post("/disconnect-env", json={"env_id": env_id}).json().get("status") != "success"
    if env_id is not None:
        reply = rollouts.client.post("/scored_data", json=body)
        assert reply.status_code in (200, 422)
    rollouts.client.post("/reset_data")


def test_sec_08_very_many_groups_in_one_body_are_bounded(rollouts: RolloutServer) -> None:
    one = json.dumps({"tokens": [[1]] * 2, "masks": [[1]] * 2, "scores": [0, 1]})
    body = f"[{','.join([one] * 1_000_000)}]".encode()
    rollouts.register(batch_size=4)
    reply = rollouts.client.post(
        "/scored_data_list", content=gzip.compress(body, 1), headers={"content-encoding": "gzip"}
    )
    assert reply.status_code == 422 and "More than 4096 groups" in reply.text
    assert rollouts.client.get("/status").json()["queue_size"] == 0
    rollouts.client.post("/reset_data")


@pytest.mark.parametrize(
    ("transport", "host"),
    [("sse", "0.0.0.0"), ("streamable-http", "::"), ("sse", "192.168.1.7"), ("sse", "127.0.0.1.evil.example")],
)
def test_sec_09_no_transport_of_the_mcp_server_leaves_loopback_without_a_token(
    environ: dict[str, str], transport: str, host: str
) -> None:
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.server", "--transport", transport, "--host", host]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "there is no token" in done.stderr

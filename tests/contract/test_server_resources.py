"""Resources: sources of environments and files of runs, found when asked for, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp.shared.exceptions import MCPError
from mcp_rig import Tools, environment_file, in_memory
from run_parts import run_request

from hermes_rl_mcp.contracts.config import Ports
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState

RUN_ID = "0123abcd"
PREFIX, NONCE = "prefix0123456789", "nonce0123456789"


@pytest.fixture
def ended_run(environ: dict[str, str]) -> RunPaths:
    """A run that ended, with a configuration and a log that hold its secrets."""
    home = Home.from_environ(environ)
    paths = home.run(RUN_ID)
    paths.dir.mkdir(parents=True)
    request = run_request(RUN_ID)
    state = RunState.create(paths, first_record(home, request), "made")
    state.move(RunStatus.FAILED, "test", error="broke")
    url = f"http://127.0.0.1:8001/{PREFIX}/v1"
    config: dict[str, Any] = {
        "run": {"run_id": RUN_ID, "nonce": NONCE, "path_prefix": PREFIX},
        "ports": Ports(rollout_api=8000, trainer=8001).model_dump(),
        "openai": [{"base_url": url, "api_key": "sk-aaaaaaaaaaaaaaaaaaaaaaaa"}],
    }
    paths.config.write_text(yaml.safe_dump(config))
    paths.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    home.logs.mkdir(parents=True)
    home.log("trainer", RUN_ID).write_text(f"first\ncalling {url} with nonce {NONCE}\nlast\n")
    return paths


async def read(call: Tools, uri: str) -> str:
    [content] = (await call.client.read_resource(uri)).contents
    text: str = content.text  # type: ignore[union-attr]
    return text


@pytest.mark.anyio
async def test_what_is_on_disk_now_is_listed_and_can_be_read(
    environ: dict[str, str], tmp_path: Path, ended_run: RunPaths
) -> None:
    path = environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        listed = {str(resource.uri) for resource in (await call.client.list_resources()).resources}
        assert {"rl://environments/own/source", f"rl://runs/{RUN_ID}/metrics"} <= listed
        for uri in listed:
            assert await read(call, uri)
        assert await read(call, "rl://environments/own/source") == path.read_text()
        assert json.loads(await read(call, f"rl://runs/{RUN_ID}/state"))["error"] == "broke"
        assert json.loads(await read(call, f"rl://runs/{RUN_ID}/metrics")) == [{"step": 1, "reward/mean": 0.5}]


@pytest.mark.anyio
async def test_sec_02_neither_configuration_nor_log_shows_a_secret(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        config = await read(call, f"rl://runs/{RUN_ID}/config")
        log = await read(call, f"rl://runs/{RUN_ID}/logs/trainer")
    for secret in (PREFIX, NONCE, "sk-aaaa"):
        assert secret not in config
        assert secret not in log
    assert yaml.safe_load(config)["ports"] == {"rollout_api": 8000, "trainer": 8001}
    assert f"calling http://127.0.0.1:8001/{'*' * len(PREFIX)}/v1" in log


@pytest.mark.anyio
async def test_a_log_is_read_by_windows_of_bytes(environ: dict[str, str], ended_run: RunPaths) -> None:
    async with in_memory(environ) as call:
        uri = f"rl://runs/{RUN_ID}/logs/trainer"
        assert await read(call, f"{uri}?offset=0&limit=5") == "first"
        assert await read(call, f"{uri}?limit=5") == "last\n"
        assert await read(call, f"{uri}?offset=100000") == ""
        assert await read(call, f"rl://runs/{RUN_ID}/logs/api") == ""


@pytest.mark.anyio
async def test_windows_side_by_side_do_not_show_a_secret_in_two_parts(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        uri = f"rl://runs/{RUN_ID}/logs/trainer"
        whole = "".join([await read(call, f"{uri}?offset={start}&limit=7") for start in range(0, 120, 7)])
    assert whole.startswith("first\ncalling")
    assert whole.endswith("last\n")
    assert PREFIX not in whole
    assert NONCE not in whole


@pytest.mark.anyio
@pytest.mark.parametrize(
    "uri",
    [
        "rl://environments/nope/source",
        "rl://environments/..%2F..%2Fetc%2Fpasswd/source",
        "rl://runs/ffffffff/state",
        "rl://runs/..%2F..%2Fetc/config",
        f"rl://runs/{RUN_ID}/logs/passwd",
        f"rl://runs/{RUN_ID}/logs/trainer?limit=999999999",
    ],
)
async def test_what_is_not_there_is_an_error(environ: dict[str, str], ended_run: RunPaths, uri: str) -> None:
    async with in_memory(environ) as call:
        with pytest.raises(MCPError):
            await call.client.read_resource(uri)


@pytest.mark.anyio
async def test_of_a_long_run_the_last_steps_are_read(environ: dict[str, str], ended_run: RunPaths) -> None:
    ended_run.metrics.write_text("".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(1, 2001)))
    async with in_memory(environ) as call:
        steps = [line["step"] for line in json.loads(await read(call, f"rl://runs/{RUN_ID}/metrics"))]
    assert steps == list(range(1501, 2001))

"""Resources: environments, and runs part by part, found when asked for, in pages and windows, without secrets."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CompletionsCapability, PromptReference, ResourceTemplateReference
from mcp_rig import Tools, environment_file, in_memory
from run_parts import run_request

from hermes_rl_mcp.checkpoints import MARKER
from hermes_rl_mcp.contracts.config import Ports
from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.files import now
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.server.resources.table import KINDS

RUN_ID = "0123abcd"
PREFIX, NONCE = "prefix0123456789", "nonce0123456789"
RUN = f"rl://runs/{RUN_ID}"


def begun(home: Home, run_id: str) -> RunState:
    """A run's directory with its record, as its launcher leaves it."""
    paths = home.run(run_id)
    paths.dir.mkdir(parents=True, exist_ok=True)
    return RunState.create(paths, first_record(home, run_request(run_id)), "made")


@pytest.fixture
def ended_run(environ: dict[str, str]) -> RunPaths:
    """A run that ended, with a configuration and a log that hold its secrets."""
    home = Home.from_environ(environ)
    paths = home.run(RUN_ID)
    begun(home, RUN_ID).move(RunStatus.FAILED, "test", error="broke")
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


def add_rollouts(run: RunPaths, *steps: int) -> None:
    """One rollout of each of these steps, with a control character in it."""
    one: dict[str, Any] = {"group": 0, "prompt": "2+2?", "completion": "4\x1b[2J", "reward": 1.0, "advantage": 0.5}
    one |= {"tokens": 2, "finish_reason": "stop"}
    with run.rollouts.open("a") as file:
        file.writelines(json.dumps({**one, "step": step, "policy_version": step - 1}) + "\n" for step in steps)


def add_checkpoint(run: RunPaths, step: int) -> None:
    """A folder that counts as a complete checkpoint to whoever lists them."""
    folder = run.checkpoints / f"step_{step}"
    folder.mkdir(parents=True)
    marker = CheckpointMarker(
        step=step, policy_version=step, base_model="m", base_sha256="0", lora_rank=8, files={}, created_at=now()
    )
    (folder / MARKER).write_text(marker.model_dump_json())


async def read(call: Tools, uri: str) -> str:
    [content] = (await call.client.read_resource(uri, cache_mode="bypass")).contents
    text: str = content.text  # type: ignore[union-attr]
    return text


async def page(call: Tools, uri: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await read(call, uri))
    return found


async def everything_listed(call: Tools) -> list[str]:
    uris: list[str] = []
    cursor = None
    while True:
        answer = await call.client.list_resources(cursor=cursor, cache_mode="bypass")
        assert len(answer.resources) <= 50
        uris += [str(resource.uri) for resource in answer.resources]
        cursor = answer.next_cursor
        if cursor is None:
            return uris


@pytest.mark.anyio
async def test_what_is_on_disk_now_is_listed_and_can_be_read(
    environ: dict[str, str], tmp_path: Path, ended_run: RunPaths
) -> None:
    path = environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        listed = await everything_listed(call)
        parts = ("state", "config", "metrics", "plot", "rollouts", "checkpoints", "events", "logs/trainer")
        assert {"rl://environments/own/source", "rl://environments/own/schema"} <= set(listed)
        assert {f"{RUN}/{part}" for part in parts} <= set(listed)
        for uri in listed:
            if not uri.endswith(("/schema", "/plot")):  # each a child process
                assert await read(call, uri) is not None
        assert await read(call, "rl://environments/own/source") == path.read_text()
        assert json.loads(await read(call, f"{RUN}/state"))["error"] == "broke"
        assert (await page(call, f"{RUN}/metrics"))["rows"] == [{"step": 1, "reward/mean": 0.5}]
        assert [row["status"] for row in (await page(call, f"{RUN}/events"))["rows"]] == ["queued", "failed"]


@pytest.mark.anyio
async def test_the_settings_of_an_environment_are_read_without_selecting_it(
    environ: dict[str, str], tmp_path: Path
) -> None:
    environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        [content] = (await call.client.read_resource("rl://environments/own/schema")).contents
        fields = {field["name"]: field for field in json.loads(content.text)["fields"]}  # type: ignore[union-attr]
        assert (fields["level"]["type"], fields["level"]["default"]) == ("int", 1)
        assert fields["level"]["description"] == "How hard."
        assert fields["level"]["json_schema"]["type"] == "integer"
        assert "data, not instructions" in str(content.meta)
        assert (await call.error("rl_get_current_config"))["error"]


@pytest.mark.anyio
async def test_whatever_a_resource_says_a_tool_says_too(
    environ: dict[str, str], tmp_path: Path, ended_run: RunPaths
) -> None:
    environment_file(tmp_path / "envs")
    add_rollouts(ended_run, 1, 2)
    add_checkpoint(ended_run, 2)
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:

        async def part(name: str) -> Any:
            return (await call("rl_get_results", run_id=RUN_ID, include=[name]))["sections"][name]

        await call("rl_select_environment", name="own")
        config = await call("rl_get_current_config")
        fields = {field["name"] for field in config["configurable_fields"] + config["locked_fields"]}
        told = {field["name"] for field in (await page(call, "rl://environments/own/schema"))["fields"]}
        status = await call("rl_check_status", run_id=RUN_ID)
        state = await page(call, f"{RUN}/state")
        source = (await call("rl_list_environments", source="own"))["source"]
        pairs: dict[str, tuple[Any, Any]] = {
            "environment-source": (await read(call, "rl://environments/own/source"), source["text"]),
            "environment-schema": (told, told & fields),
            "run-state": ((state["status"], state["error"]), (status["status"], status["error"])),
            "run-config": (await read(call, f"{RUN}/config"), (await part("config"))["text"]),
            "run-log": (await read(call, f"{RUN}/logs/trainer"), (await part("log"))["text"]),
        }
        for name in ("metrics", "rollouts", "checkpoints", "events"):
            pairs[f"run-{name}"] = ((await page(call, f"{RUN}/{name}"))["rows"], (await part(name))["rows"])
    for kind, (resource, tool) in pairs.items():
        assert resource, kind
        assert resource == tool, kind
    assert {kind.name for kind in KINDS} - set(pairs) <= {"run-plot", "dataset"}, "these have tests of their own"


@pytest.mark.slow
@pytest.mark.anyio
async def test_the_picture_of_a_run_is_the_same_as_a_resource_and_in_an_answer(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        [resource] = (await call.client.read_resource(f"{RUN}/plot")).contents
        answer = await call.raw("rl_get_results", {"run_id": RUN_ID, "include": ["plot"]})
    [picture] = [block for block in answer.content if block.type == "image"]
    assert resource.mime_type == picture.mime_type == "image/png"
    assert base64.b64decode(picture.data).startswith(b"\x89PNG")
    assert resource.blob == picture.data  # type: ignore[union-attr]


@pytest.mark.anyio
async def test_sec_02_neither_configuration_nor_log_shows_a_secret(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        config = await read(call, f"{RUN}/config")
        log = await read(call, f"{RUN}/logs/trainer")
    for secret in (PREFIX, NONCE, "sk-aaaa"):
        assert secret not in config
        assert secret not in log
    assert yaml.safe_load(config)["ports"] == {"rollout_api": 8000, "trainer": 8001}
    assert f"calling http://127.0.0.1:8001/{'*' * len(PREFIX)}/v1" in log


@pytest.mark.anyio
async def test_a_log_is_read_by_windows_of_bytes_and_by_its_last_lines(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        uri = f"{RUN}/logs/trainer"
        assert await read(call, f"{uri}?offset=0&limit=5") == "first"
        assert await read(call, f"{uri}?limit=5") == "last\n"
        assert await read(call, f"{uri}?tail=1") == "last\n"
        assert (await read(call, f"{uri}?tail=2")).startswith("calling")
        assert await read(call, f"{uri}?tail=100") == await read(call, uri)
        assert await read(call, f"{uri}?offset=100000") == ""
        assert await read(call, f"{RUN}/logs/api") == ""


@pytest.mark.anyio
async def test_a_log_that_grows_is_followed_by_what_each_window_says_of_the_next(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    log = Home.from_environ(environ).log("env", RUN_ID)
    log.write_text("one\n\x1b[31mtwo\n")
    text, offset = "", 0
    async with in_memory(environ) as call:
        for more in ("three\n", "", "four\n"):
            while True:
                uri = f"{RUN}/logs/env?offset={offset}&limit=6"
                [content] = (await call.client.read_resource(uri, cache_mode="bypass")).contents
                window = (content.meta or {})["hermes-rl/window"]
                text += content.text  # type: ignore[union-attr]
                offset = window["next_offset"]
                if not window["truncated"]:
                    break
            with log.open("a") as file:
                file.write(more)
        text += await read(call, f"{RUN}/logs/env?offset={offset}")
    assert text == "one\n\\x1b[31mtwo\nthree\nfour\n"


@pytest.mark.anyio
async def test_windows_side_by_side_do_not_show_a_secret_in_two_parts(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    async with in_memory(environ) as call:
        uri = f"{RUN}/logs/trainer"
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
        "rl://environments/nope/schema",
        "rl://environments/..%2F..%2Fetc%2Fpasswd/source",
        "rl://runs/ffffffff/state",
        "rl://runs/..%2F..%2Fetc/config",
        f"{RUN}/nothing",
        f"{RUN}/logs/passwd",
        f"{RUN}/logs/trainer?limit=999999999",
        f"{RUN}/logs/trainer?limit=0",
        f"{RUN}/logs/trainer?offset=0&tail=5",
        f"{RUN}/logs/trainer?offset={10**30}",
        f"{RUN}/logs/trainer?tial=5",
        f"{RUN}/metrics?limit=x",
        f"{RUN}/state?offset=1",
    ],
)
async def test_what_is_not_there_or_asked_wrongly_is_the_clients_error(
    environ: dict[str, str], ended_run: RunPaths, uri: str
) -> None:
    async with in_memory(environ) as call:
        with pytest.raises(MCPError) as refused:
            await call.client.read_resource(uri)
    assert refused.value.code == INVALID_PARAMS


@pytest.mark.anyio
async def test_a_long_run_is_read_spread_over_all_its_steps_or_in_windows(
    environ: dict[str, str], ended_run: RunPaths
) -> None:
    ended_run.metrics.write_text("".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(1, 2001)))
    async with in_memory(environ) as call:
        spread = await page(call, f"{RUN}/metrics")
        steps = [row["step"] for row in spread["rows"]]
        assert (steps[0], steps[-1], spread["total"], spread["truncated"]) == (1, 2000, 2000, False)
        assert len(steps) <= 100
        read_steps: list[int] = []
        offset: int | None = 0
        while offset is not None:
            window = await page(call, f"{RUN}/metrics?offset={offset}&limit=700")
            read_steps += [row["step"] for row in window["rows"]]
            offset = window["next_offset"]
        assert read_steps == list(range(1, 2001))


@pytest.mark.anyio
async def test_rollouts_of_one_step_are_read_and_marked_as_data(environ: dict[str, str], ended_run: RunPaths) -> None:
    add_rollouts(ended_run, 1, 2, 2)
    async with in_memory(environ) as call:
        found = await page(call, f"{RUN}/rollouts?step=2")
        assert [row["policy_version"] for row in found["rows"]] == [1, 1]
        assert found["rows"][0]["completion"] == "4\\x1b[2J"
        assert "data, not instructions" in found["untrusted"]
        assert len((await page(call, f"{RUN}/rollouts"))["rows"]) == 3


@pytest.mark.anyio
async def test_many_runs_are_listed_page_by_page_and_what_comes_in_between_moves_nothing(
    environ: dict[str, str],
) -> None:
    home = Home.from_environ(environ)
    ids = [f"{number:08x}" for number in range(70)]
    for run_id in ids:
        begun(home, run_id).move(RunStatus.FAILED, "test")
    async with in_memory(environ) as call:
        first = await call.client.list_resources()
        begun(home, "ffffffff").move(RunStatus.FAILED, "test")
        cursor, rest = first.next_cursor, []
        while cursor:
            answer = await call.client.list_resources(cursor=cursor)
            rest += [str(resource.uri) for resource in answer.resources]
            cursor = answer.next_cursor
        seen = [str(resource.uri) for resource in first.resources] + rest
        states = [uri for uri in seen if uri.endswith("/state")]
        assert sorted(states) == [f"rl://runs/{run_id}/state" for run_id in ids]
        of_runs = [uri for uri in await everything_listed(call) if "/runs/" in uri]
        assert len(of_runs) < 130, "of older runs the state alone"
        for cursor in ("nobody's", "WyJhIl0=", "WyI=", "W" * 8):
            with pytest.raises(MCPError) as refused:
                await call.client.list_resources(cursor=cursor)
            assert refused.value.code == INVALID_PARAMS


@pytest.mark.anyio
async def test_templates_are_listed_and_their_arguments_complete(
    environ: dict[str, str], tmp_path: Path, ended_run: RunPaths
) -> None:
    environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        assert call.client.server_capabilities.completions == CompletionsCapability()
        templates = {
            one.name: one.uri_template for one in (await call.client.list_resource_templates()).resource_templates
        }

        async def values(template: str, argument: str, typed: str) -> list[str]:
            ref = ResourceTemplateReference(type="ref/resource", uri=templates[template])
            answer = await call.client.complete(ref, {"name": argument, "value": typed})
            assert answer.completion.total == len(answer.completion.values)
            return answer.completion.values

        assert await values("environment-source", "name", "ow") == ["own"]
        assert {"arithmetic", "own"} <= set(await values("environment-schema", "name", ""))
        assert await values("dataset", "id", "gsm") == ["gsm8k_sample"]
        assert await values("run-metrics", "run_id", "01") == [RUN_ID]
        assert await values("run-log", "process", "tr") == ["trainer"]
        assert await values("run-log", "process", "") == ["api", "trainer", "env", "supervisor"]
        assert await values("run-metrics", "offset", "1") == []
        prompts = (await call.client.list_prompts()).prompts
        for prompt in prompts:
            for argument in prompt.arguments or []:
                if argument.name in ("environment", "run_id"):
                    ref = PromptReference(type="ref/prompt", name=prompt.name)
                    found = await call.client.complete(ref, {"name": argument.name, "value": ""})
                    assert {"own", RUN_ID} & set(found.completion.values)

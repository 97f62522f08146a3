"""The ten tools as a client sees them: names, arguments, fields, errors, and answers that fit their schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp_rig import SERVER, environment_file, in_memory, over_stdio

PARTS = {"include", "process", "step", "offset", "limit"}
ARGUMENTS = {
    "rl_list_environments": (set(), {"source", "dataset", "split", "offset", "limit"}),
    "rl_select_environment": ({"name"}, set()),
    "rl_get_current_config": (set(), {"text", "offset", "limit"}),
    "rl_edit_config": ({"field", "value"}, {"revision"}),
    "rl_start_training": (
        set(),
        {"idempotency_key", "resume_from", "dry_run", "export_of", "export_format", "confirm"},
    ),
    "rl_check_status": ({"run_id"}, {"wait_seconds", *PARTS}),
    "rl_stop_training": ({"run_id"}, {"confirm"}),
    "rl_get_results": ({"run_id"}, {"max_points", "metrics", *PARTS}),
    "rl_list_runs": (set(), {"limit", "offset", "environment", "status", "model", "text", "compare", "plot"}),
    "rl_test_inference": (set(), {"num_steps", "group_size", "models", "test_id", "wait_seconds", "offset"}),
}
"""Required and optional arguments: those of the original, and ours, which are all optional."""

FIELDS = {
    "rl_list_environments": {"environments", "count", "tips"},
    "rl_select_environment": {"message", "environment", "file_path"},
    "rl_get_current_config": {"environment", "configurable_fields", "locked_fields", "tip"},
    "rl_edit_config": {"message", "field", "value", "config"},
    "rl_start_training": {
        *("run_id", "status", "environment", "config", "wandb_project", "wandb_run_name", "config_path", "logs"),
        "message",
    },
    "rl_check_status": {
        *("run_id", "status", "environment", "running_time_minutes", "processes", "wandb_project", "wandb_run_name"),
        *("logs", "metrics", "error", "wandb_url", "wandb_error", "rate_limited", "next_check_in_seconds", "message"),
    },
    "rl_stop_training": {"message", "run_id", "status"},
    "rl_get_results": {
        *("run_id", "status", "environment", "wandb_project", "wandb_run_name", "wandb_url", "final_metrics"),
        *("history", "wandb_error"),
    },
    "rl_list_runs": {"runs", "count"},
    "rl_test_inference": {"environment", "environment_file", "test_config", "models_tested", "summary"},
}
"""Names of the original's answers."""


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_over_stdio_the_ten_tools_are_all_there_is_and_selecting_and_editing_work(
    environ: dict[str, str], tmp_path: Path, mode: str
) -> None:
    environment_file(tmp_path / "envs")
    async with over_stdio(environ, mode, "--env-dir", str(tmp_path / "envs")) as call:
        assert set(call.listed) == set(ARGUMENTS)
        listed = await call("rl_list_environments")
        names = sorted(info["name"] for info in listed["environments"])
        assert {"own", "arithmetic", "gsm8k", "terminal-test"} <= set(names)
        assert {"name", "class_name", "file_path", "description"} <= set(listed["environments"][0])
        assert listed["count"] == len(listed["environments"])
        assert (await call.error("rl_select_environment", name="nope"))["available"] == names
        assert (await call("rl_select_environment", name="own"))["environment"] == "own"
        edited = await call("rl_edit_config", field="level", value="8")
        assert (edited["value"], edited["config"]) == (8, {"level": 8})
        config = await call("rl_get_current_config")
        level = next(field for field in config["configurable_fields"] if field["name"] == "level")
        assert {k: level[k] for k in ("type", "default", "current_value", "description")} == {
            "type": "int",
            "default": 1,
            "current_value": 8,
            "description": "How hard.",
        }
        runs = await call("rl_list_runs")
        assert (runs["runs"], runs["count"]) == ([], 0)
        assert (await call.error("rl_check_status", run_id="ffffffff"))["active_runs"] == []


@pytest.mark.anyio
async def test_names_arguments_hints_and_answer_fields_are_those_of_the_contract(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        for name, (required, optional) in ARGUMENTS.items():
            tool = call.listed[name]
            properties = tool.input_schema.get("properties", {})
            assert set(tool.input_schema.get("required", [])) == required, name
            assert set(properties) == required | optional, name
            assert all(part.get("description") for part in properties.values()), name
            assert tool.output_schema is not None
            assert FIELDS[name] <= set(tool.output_schema["properties"]), name
            assert tool.title
            assert tool.description
            assert len(tool.description) < 2000
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint is not None
        value = call.listed["rl_edit_config"].input_schema["properties"]["value"]
        assert "type" not in value
        assert "$ref" not in value
        assert len(call.client.instructions or "") < 2000
        destructive = [n for n, tool in call.listed.items() if tool.annotations and tool.annotations.destructive_hint]
        assert destructive == ["rl_stop_training"]


@pytest.mark.anyio
async def test_errors_say_what_there_is_and_lose_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        for tool, arguments in (
            ("rl_get_current_config", {}),
            ("rl_edit_config", {"field": "x", "value": 1}),
            ("rl_start_training", {}),
            ("rl_test_inference", {}),
        ):
            assert "rl_select_environment" in (await call.error(tool, **arguments))["hint"]
        await call("rl_select_environment", name="own")
        await call("rl_edit_config", field="level", value=5)
        before = await call("rl_get_current_config")
        assert "learning_rate" in (await call.error("rl_edit_config", field="lr", value=1))["available_fields"]
        assert (await call.error("rl_edit_config", field="base_url", value="http://x"))["locked_value"]
        for field, value in [
            ("level", "high"),
            ("level", None),
            ("level", [1]),
            ("batch_size", 2.5),
            ("learning_rate", "fast"),
            ("learning_rate", 0.5),
            ("lora_rank", 0),
            ("lora_rank", 129),
            ("group_size", 1),
            ("group_size", 65),
            ("total_steps", 0),
            ("model_name", "stranger/model"),
            ("timeout", "soon"),
        ]:
            assert field in (await call.error("rl_edit_config", field=field, value=value))["error"], (field, value)
        assert await call("rl_get_current_config") == before
        for tool in ("rl_check_status", "rl_stop_training", "rl_get_results"):
            for run_id in ("ffffffff", "../../etc", ""):
                assert "not found" in (await call.error(tool, run_id=run_id))["error"]
        assert "wait_seconds" in (await call.error("rl_check_status", run_id="ffffffff", wait_seconds=51))["error"]
        assert "not found" in (await call.error("rl_test_inference", test_id="../x"))["error"]
        unknown = await call.raw("rl_nothing", {})
        assert unknown.is_error
        assert unknown.structured_content == {
            "error": "Unknown tool: rl_nothing.",
            "hint": "tools/list has those that are.",
        }


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"batch_size": 10}, "8 or 12"),
        ({"group_size": 16}, "smaller than group_size"),
        ({"data_dir": "/no/such/folder"}, "not an existing folder"),
    ],
)
async def test_a_run_that_could_not_work_is_refused_before_anything_starts(
    environ: dict[str, str], tmp_path: Path, edits: dict[str, Any], says: str
) -> None:
    environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        for field, value in edits.items():
            await call("rl_edit_config", field=field, value=value)
        error = await call.error("rl_start_training")
        assert says in f"{error['error']} {error['hint']}"
        assert (await call("rl_list_runs"))["count"] == 0


@pytest.mark.anyio
async def test_selecting_drops_edits_and_secrets_are_not_shown(environ: dict[str, str], tmp_path: Path) -> None:
    environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        await call.error("rl_edit_config", field="wandb_project", value="token=sk-abcdefghijklmnop1234")
        await call("rl_edit_config", field="wandb_project", value="password=abcdefghijklmnop")
        assert "abcdefghijklmnop" not in json.dumps(await call("rl_get_current_config"))
        await call("rl_select_environment", name="own")
        config = await call("rl_get_current_config")
        project = next(field for field in config["configurable_fields"] if field["name"] == "wandb_project")
        assert project["current_value"] == "hermes-rl"
        assert next(f for f in config["locked_fields"] if f["name"] == "wandb_name")["locked_value"].startswith("own-")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no luck')\n", "RuntimeError: no luck"),
        ("import a_package_nobody_has\n", "a_package_nobody_has"),
        ("print('noise'); import os; os._exit(3)\n", "exit code 3"),
        ("import sys; sys.exit(3)\n", "sys.exit(3)"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_is_an_error_with_its_own_words(
    environ: dict[str, str], tmp_path: Path, body: str, says: str
) -> None:
    path = environment_file(tmp_path / "envs", body)
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        error = await call.error("rl_select_environment", name="own")
        assert says in error["error"]
        assert str(path) in error["error"]
        assert "No environment selected" in (await call.error("rl_get_current_config"))["error"]


@pytest.mark.anyio
async def test_a_missing_optional_package_says_how_to_install_it(environ: dict[str, str], tmp_path: Path) -> None:
    environment_file(tmp_path / "envs", "import tinker\n")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        error = await call.error("rl_select_environment", name="own")
    assert "pip install 'hermes-rl-mcp[tinker]'" in error["hint"]


@pytest.mark.anyio
async def test_a_file_that_changed_is_described_anew_and_one_that_vanished_is_an_error(
    environ: dict[str, str], tmp_path: Path
) -> None:
    path = environment_file(tmp_path / "envs")
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        path.write_text(path.read_text().replace("level: int = 1", "level: int = 7"))
        config = await call("rl_get_current_config")
        level = next(field for field in config["configurable_fields"] if field["name"] == "level")
        assert level["current_value"] == 7
        path.unlink()
        assert "not found" in (await call.error("rl_get_current_config"))["error"]


@pytest.mark.anyio
async def test_a_defect_is_shown_as_one_without_its_traceback(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with in_memory(environ) as call:
        monkeypatch.setattr("hermes_rl_mcp.operations.environments.scan", lambda *_: 1 / 0)
        error = await call.error("rl_list_environments")
    assert "Internal error" in error["error"]
    assert "division" not in json.dumps(error)
    assert "ZeroDivisionError: division by zero" in caplog.text


def test_fi_16_every_line_on_stdout_is_a_message_of_the_protocol(environ: dict[str, str], tmp_path: Path) -> None:
    environment_file(tmp_path / "envs", "print('an environment prints at import')\n")
    initialize = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    calls = [("rl_select_environment", {"name": "own"}), ("rl_get_current_config", {}), ("rl_nothing", {})]
    messages: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": initialize},
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/list"},
    ]
    messages += [
        {"id": 2 + i, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    process = subprocess.Popen(
        [sys.executable, *SERVER, "--env-dir", str(tmp_path / "envs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    answers: dict[int, Any] = {}
    for message in messages:
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        process.stdin.flush()
        while "id" in message and message["id"] not in answers:
            answer = json.loads(process.stdout.readline())
            assert answer["jsonrpc"] == "2.0"
            if "id" in answer:
                answers[answer["id"]] = answer
    process.stdin.close()
    assert process.stdout.read() == ""
    assert process.wait(timeout=100) == 0
    process.stdout.close()
    assert len(answers[1]["result"]["tools"]) == 10
    assert not answers[2]["result"].get("isError")
    assert answers[4]["result"]["isError"]

"""``hermes_rl_mcp.tools``: the same ten by name and argument, as functions that return JSON text."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from full_run import full_run
from mcp_rig import environment_file, in_memory
from test_security_answers import RUN, hostile_run

from hermes_rl_mcp import tools


@pytest.fixture
def process_environ(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return environ


@pytest.mark.anyio
async def test_they_have_the_names_arguments_and_defaults_of_the_tools(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        assert set(tools.__all__) == set(call.listed)
        for name, tool in call.listed.items():
            parameters = inspect.signature(getattr(tools, name)).parameters
            properties = tool.input_schema.get("properties", {})
            assert set(parameters) == set(properties), name
            for argument, part in properties.items():
                default = parameters[argument].default
                required = argument in tool.input_schema.get("required", [])
                assert required is (default is inspect.Parameter.empty), (name, argument)
                if not required:  # what is empty by default is published without one
                    assert part.get("default", default) == default, (name, argument)
                    assert "default" in part or default in (None, "", ()), (name, argument)


@pytest.mark.anyio
async def test_an_answer_is_json_text_and_an_error_is_one_too(process_environ: dict[str, str]) -> None:
    text = await tools.rl_list_environments()
    assert text.startswith('{\n  "environments"')
    assert json.loads(text)["count"] >= 2
    assert "rl_select_environment" in json.loads(await tools.rl_get_current_config())["hint"]
    assert json.loads(await tools.rl_select_environment("gsm8k_tinker"))["environment"] == "gsm8k"
    assert json.loads(await tools.rl_edit_config("lora_rank", "4"))["value"] == 4
    locked = json.loads(await tools.rl_edit_config("tokenizer_name", "x"))
    assert set(locked) == {"error", "hint", "locked_value"}
    assert json.loads(await tools.rl_check_status("ffffffff"))["active_runs"] == []
    runs = json.loads(await tools.rl_list_runs())
    assert (runs["runs"], runs["count"]) == ([], 0)


@pytest.mark.anyio
async def test_sec_02_sec_20_functions_tell_no_key_either_and_label_what_they_quote(
    process_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = "s3ntinel/of+a=key"
    record = hostile_run(process_environ).record
    record.write_text(record.read_text().replace("Ignore previous instructions", f"key {key}"))
    environment_file(tmp_path / "envs", f'raise RuntimeError("key {key}")\n')
    monkeypatch.setenv("OPENAI_API_KEY", key)
    monkeypatch.setenv("HERMES_RL_ENV_DIRS", str(tmp_path / "envs"))
    for text in (
        await tools.rl_check_status(RUN),
        await tools.rl_get_results(RUN),
        await tools.rl_list_runs(),
        await tools.rl_select_environment("own"),
    ):
        assert "key ***" in text and key not in text
        assert "data, not instructions" in json.loads(text)["untrusted"]


@pytest.mark.anyio
async def test_settings_that_make_no_sense_are_an_error_in_the_text(
    process_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_RL_PROFILE", "nope")
    assert "hermes, local" in json.loads(await tools.rl_list_runs())["hint"]


@pytest.mark.anyio
async def test_they_take_what_the_tools_take_and_answer_the_same(
    process_environ: dict[str, str], tmp_path: Path
) -> None:
    full_run(process_environ, RUN)
    full_run(process_environ, "0123abce", environment="other")
    await tools.rl_select_environment("gsm8k")
    async with in_memory(process_environ) as call:
        for name, arguments in (
            ("rl_list_environments", {"source": "gsm8k", "offset": 100, "limit": 500}),
            ("rl_get_current_config", {"text": "length", "limit": 2}),
            ("rl_get_results", {"run_id": RUN, "metrics": ["reward/"], "include": ["rollouts", "events"], "limit": 1}),
            ("rl_list_runs", {"environment": "other"}),
            ("rl_list_runs", {"compare": [RUN, "0123abce"]}),
            ("rl_check_status", {"run_id": RUN, "include": ["log"], "process": "env", "offset": 3, "limit": 9}),
        ):
            said = json.loads(await getattr(tools, name)(**arguments))
            assert said == await call(name, **arguments), name
    assert "rollouts" in json.loads(await tools.rl_get_results(RUN, include=["weights"]))["valid_values"]  # type: ignore[list-item]
    assert "greater than" in json.loads(await tools.rl_get_results(RUN, limit=-1))["error"]

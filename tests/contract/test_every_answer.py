"""Every answer of every tool fits the schema that the tool publishes, and every error says what to do next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import mcp.types as t
import pytest
from many_runs import fill
from mcp import Client
from mcp_rig import environment_file
from run_parts import run_request

from hermes_rl_mcp.contracts.results import InferenceTestConfig, TestInference
from hermes_rl_mcp.operations.inference_records import TestState
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.server.app import HermesServer, build_server

ENDED, DAMAGED, WAITING, TEST = "00000001", "00000002", "0000beef", "0123abcd"
pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ["auto", "legacy"])

BEFORE_SELECTING: list[tuple[str, dict[str, Any]]] = [
    ("rl_get_current_config", {}),
    ("rl_edit_config", {"field": "level", "value": 1}),
    ("rl_start_training", {}),
    ("rl_test_inference", {}),
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("rl_list_environments", {}),
    ("rl_select_environment", {"name": "own"}),
    ("rl_get_current_config", {}),
    ("rl_edit_config", {"field": "learning_rate", "value": 1e-5}),
    ("rl_edit_config", {"field": "level", "value": "3"}),
    ("rl_start_training", {"dry_run": True}),
    ("rl_start_training", {"idempotency_key": f"key-{ENDED}"}),
    ("rl_check_status", {"run_id": ENDED}),
    ("rl_check_status", {"run_id": WAITING, "wait_seconds": 0.1}),
    ("rl_stop_training", {"run_id": ENDED}),
    ("rl_stop_training", {"run_id": WAITING}),
    ("rl_get_results", {"run_id": ENDED}),
    ("rl_get_results", {"run_id": ENDED, "max_points": 1}),
    ("rl_get_results", {"run_id": WAITING}),
    ("rl_list_runs", {}),
    ("rl_list_runs", {"limit": 1}),
    ("rl_test_inference", {"test_id": TEST}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("rl_select_environment", {"name": "nope"}),
    ("rl_select_environment", {"name": ""}),
    ("rl_select_environment", {}),
    ("rl_edit_config", {"field": "nope", "value": 1}),
    ("rl_edit_config", {"field": "level", "value": "high"}),
    ("rl_edit_config", {"field": "learning_rate", "value": 9}),
    ("rl_edit_config", {"field": "model_name", "value": "stranger/model"}),
    ("rl_edit_config", {"field": "base_url", "value": "http://x"}),
    ("rl_edit_config", {"field": "level", "value": 1, "revision": 10_000}),
    ("rl_edit_config", {"field": "wandb_project", "value": "long" * 200}),
    *(
        ("rl_list_environments", {"dataset": "gsm8k_sample", **asked})
        for asked in ({"limit": 100_000}, {"offset": 10**12}, {"split": "nope"}, {"dataset": " "}, {"source": "own"})
    ),
    ("rl_list_environments", {"source": "nope"}),
    ("rl_start_training", {"resume_from": "ffffffff"}),
    ("rl_start_training", {"resume_from": DAMAGED}),
    ("rl_start_training", {"dry_run": "perhaps"}),
    ("rl_start_training", {"export_of": WAITING}),
    ("rl_start_training", {"export_of": "ffffffff"}),
    ("rl_start_training", {"export_of": ENDED, "export_format": "zip"}),
    ("rl_start_training", {"export_of": ENDED, "dry_run": True}),
    *(
        (tool, {"run_id": run_id})
        for tool in ("rl_check_status", "rl_stop_training", "rl_get_results")
        for run_id in ("ffffffff", "../../etc", "", DAMAGED)
    ),
    ("rl_check_status", {"run_id": ENDED, "wait_seconds": 51}),
    ("rl_check_status", {}),
    ("rl_get_results", {"run_id": ENDED, "max_points": 0}),
    ("rl_list_runs", {"limit": 0}),
    ("rl_list_runs", {"limit": "many"}),
    ("rl_list_runs", {"plot": True}),
    ("rl_test_inference", {"test_id": "../x"}),
    ("rl_test_inference", {"num_steps": 0}),
    ("rl_test_inference", {"models": []}),
    ("rl_test_inference", {"models": ["stranger/model"]}),
    ("rl_nothing", {}),
]


class Checked:
    """Calls a tool, and checks whatever comes back."""

    def __init__(self, client: Client, tools: list[t.Tool]) -> None:
        self.client = client
        self.schemas = {tool.name: tool.output_schema for tool in tools}
        self.inputs = {tool.name: tool.input_schema for tool in tools}

    async def __call__(self, tool: str, arguments: dict[str, Any]) -> t.CallToolResult:
        answer = await self.client.call_tool(tool, arguments)
        content = answer.structured_content
        assert content is not None, (tool, arguments)
        json.dumps(content, allow_nan=False)
        if schema := self.schemas.get(tool):
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.Draft202012Validator(schema).validate(content)
            further = set(content) - set(schema["properties"])
            assert answer.is_error or not further, f"{tool} publishes nothing of {further}"
        first = answer.content[0]
        assert isinstance(first, t.TextContent) and first.text.strip()
        return answer

    async def error(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer = await self(tool, arguments)
        assert answer.is_error, f"{tool} {arguments}: {answer.structured_content}"
        payload = answer.structured_content
        [block] = answer.content
        assert payload is not None and isinstance(block, t.TextContent)
        assert payload["error"].strip() and payload.get("hint", "").strip(), f"{tool} {arguments} has no next step"
        assert payload["hint"].splitlines()[0] in block.text
        return payload


@pytest.fixture
def server(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HermesServer:
    """Over a home with an ended run, a damaged one, one that waits, and a test that is done."""
    monkeypatch.setattr("hermes_rl_mcp.runs.launch._STOP_ANSWER_S", 0.0)
    environment_file(tmp_path / "envs")
    replaced = tmp_path / "commands.json"  # a trainer that is not ours is not measured
    replaced.write_text(json.dumps({"commands": {"trainer": ["false"]}}))
    environ = {**environ, "HERMES_RL_CHILD_COMMANDS": str(replaced)}
    home = Home.from_environ(environ)
    fill(home, 2, steps=3, log_bytes=100)
    home.run(DAMAGED).record.write_text("{")
    folder = home.inference_tests / TEST
    folder.mkdir(parents=True)
    tested = TestInference(
        status="completed",
        test_id=TEST,
        environment="own",
        environment_file="own.py",
        test_config=InferenceTestConfig(num_steps=1, group_size=2, rollouts_per_model=2, total_rollouts=2),
    )
    (folder / "state.json").write_text(TestState(result=tested).model_dump_json())
    return build_server(Operations.from_environ(environ, Flags(env_dirs=[str(tmp_path / "envs")])))


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.slow)])
async def test_every_answer_fits_its_schema_and_every_error_has_a_next_step(server: HermesServer, mode: Any) -> None:
    home = server.operations.context.home
    request = run_request(WAITING)
    with launch._draft(home, request) as (draft, lock):
        launch._publish(home, request, draft)
    try:
        async with Client(server, mode=mode) as client:
            call = Checked(client, (await client.list_tools()).tools)
            assert {tool for tool, _ in GOOD} == set(call.schemas)
            for tool, arguments in BEFORE_SELECTING:
                assert "rl_select_environment" in (await call.error(tool, arguments))["hint"]
            for tool, arguments in GOOD:
                answer = await call(tool, arguments)
                assert not answer.is_error, f"{tool} {arguments}: {answer.structured_content}"
            for tool, arguments in BAD:
                await call.error(tool, arguments)
            for tool, schema in call.inputs.items():
                if "include" in schema["properties"]:
                    names = _enum(schema["properties"]["include"], schema) - {"plot"}  # drawn elsewhere
                    for run_id in (ENDED, WAITING):
                        for included in [[name] for name in sorted(names)] + [sorted(names)]:
                            assert not (await call(tool, {"run_id": run_id, "include": included})).is_error
    finally:
        lock.release()


def _enum(part: Any, schema: dict[str, Any]) -> set[str]:
    """The values that a list's items may have."""
    text = json.dumps([part, schema.get("$defs", {})])
    found: set[str] = set()
    for values in _values(json.loads(text), "enum"):
        found |= set(values)
    assert found, text
    return found


def _values(value: Any, key: str) -> list[list[str]]:
    if isinstance(value, dict):
        own = [value[key]] if key in value else []
        return own + [found for part in value.values() for found in _values(part, key)]
    return [found for part in value for found in _values(part, key)] if isinstance(value, list) else []


@eras
async def test_a_defect_is_an_error_with_a_next_step_too(
    server: HermesServer, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(server, mode=mode) as client:
        call = Checked(client, (await client.list_tools()).tools)
        monkeypatch.setattr("hermes_rl_mcp.operations.environments.scan", lambda *_: 1 / 0)
        assert "defect" in (await call.error("rl_list_environments", {}))["error"]

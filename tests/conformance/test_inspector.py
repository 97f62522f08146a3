"""MCP Inspector's command line in both eras, ``--strict``: everything a person can do with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_tools import INSPECTOR, need_node, run_node
from run_parts import run_request
from served import product

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
RUN_ID, OTHER_ID = "0123abcd", "4567cdef"
TOOL_ERROR = 5
"""Exit code for an answer with isError."""
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("rl_list_environments", {}),
    ("rl_select_environment", {"name": "arithmetic"}),
    ("rl_edit_config", {"field": "model_name", "value": "builtin:tiny"}),
    ("rl_get_current_config", {}),
    ("rl_test_inference", {"num_steps": 1, "group_size": 2, "wait_seconds": 50}),
    ("rl_start_training", {"dry_run": True}),
    ("rl_check_status", {"run_id": RUN_ID}),
    ("rl_stop_training", {"run_id": RUN_ID}),
    ("rl_get_results", {"run_id": RUN_ID}),
    ("rl_list_runs", {"limit": 5}),
]
"""In this order; each of the ten tools."""
PROMPTS = {
    "train_model": "goal=longer sums",
    "create_environment": "dataset=openai/gsm8k",
    "diagnose_run": f"run_id={RUN_ID}",
    "compare_runs": f"run_ids={RUN_ID},{OTHER_ID}",
}


@pytest.fixture
def ended_runs(environ: dict[str, str]) -> None:
    home = Home.from_environ(environ)
    for run_id in (RUN_ID, OTHER_ID):
        paths = home.run(run_id)
        paths.dir.mkdir(parents=True)
        state = RunState.create(paths, first_record(home, run_request(run_id)), "made")
        state.move(RunStatus.FAILED, "test", error="broke")
        paths.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')


class Inspector:
    def __init__(self, folder: Path, era: str, *server: str) -> None:
        self._folder = folder
        # A server that a busy machine starts over stdio may take longer than the Inspector waits by itself.
        self._last = ["--protocol-era", era, "--format", "json", "-q", "--connect-timeout", "100000"]
        self._server = server

    def run(self, method: str, *arguments: str) -> tuple[int, str, str]:
        done = run_node(
            INSPECTOR, ["--cli", *self._server, "--method", method, *arguments, *self._last], self._folder, 250
        )
        return done.returncode, done.stdout, done.stderr

    def __call__(self, method: str, *arguments: str) -> dict[str, Any]:
        code, out, err = self.run(method, *arguments)
        assert code == 0, (method, arguments, code, out[:3000], err[-2000:])
        result: dict[str, Any] = json.loads(out)["result"]
        return result

    def tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        given = [part for key, value in arguments.items() for part in ("--tool-arg", f"{key}={json.dumps(value)}")]
        return self("tools/call", "--tool-name", name, *given)


@pytest.fixture(params=["legacy", "modern"])
def inspect(environ: dict[str, str], tmp_path: Path, ended_runs: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    need_node()
    with product(environ, tmp_path / "server.log") as address:
        yield Inspector(tmp_path, request.param, "--server-url", f"{address}/mcp", "--transport", "http")


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_finds_no_fault_with_the_lists_over_stdio(
    environ: dict[str, str], tmp_path: Path, era: str
) -> None:
    need_node()
    given = [part for name, value in environ.items() for part in ("-e", f"{name}={value}")]
    inspect = Inspector(tmp_path, era, sys.executable, "-P", "-m", "hermes_rl_mcp.server", *given)
    assert len(inspect("tools/list", "--strict")["tools"]) == 10
    assert inspect("resources/list")["resources"]


def test_the_inspector_calls_each_of_the_ten_tools(inspect: Inspector) -> None:
    assert {tool["name"] for tool in inspect("tools/list", "--strict")["tools"]} == {name for name, _ in CALLS}
    for name, arguments in CALLS:
        assert inspect.tool(name, arguments)["structuredContent"]
    code, out, _ = inspect.run("tools/call", "--tool-name", "rl_check_status", "--tool-arg", "run_id=nope")
    assert code == TOOL_ERROR
    assert "not found" in out


def test_the_inspector_reads_resources_and_prompts(inspect: Inspector) -> None:
    listed = [resource["uri"] for resource in inspect("resources/list")["resources"]]
    assert f"rl://runs/{RUN_ID}/state" in listed
    for uri in ("rl://environments/arithmetic/source", f"rl://runs/{RUN_ID}/state"):
        assert inspect("resources/read", "--uri", uri)["contents"]
    assert inspect("resources/templates/list")["resourceTemplates"]
    assert {prompt["name"] for prompt in inspect("prompts/list")["prompts"]} == set(PROMPTS)
    for name, argument in PROMPTS.items():
        assert inspect("prompts/get", "--prompt-name", name, "--prompt-args", argument)["messages"]

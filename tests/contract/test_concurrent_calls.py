"""Fifty calls at once, of all ten tools: each gets its own good answer, and what they leave is one consistent state."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from many_runs import fill
from mcp_rig import environment_file, in_memory

from hermes_rl_mcp.paths import Home

RUNS, CALLS = 3, 50
KEY = "key-00000001"
pytestmark = pytest.mark.anyio


async def test_fifty_calls_of_all_tools_at_once_are_all_answered_as_one_by_one(
    environ: dict[str, str], tmp_path: Path
) -> None:
    environment_file(tmp_path / "envs")
    home = Home.from_environ(environ)
    fill(home, RUNS, steps=20, log_bytes=1000)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("rl_list_environments", {}),
        ("rl_select_environment", {"name": "own"}),
        ("rl_get_current_config", {}),
        ("rl_edit_config", {"field": "learning_rate", "value": 1e-4}),
        ("rl_start_training", {"idempotency_key": KEY}),
        ("rl_check_status", {"run_id": "00000001"}),
        ("rl_stop_training", {"run_id": "00000002"}),
        ("rl_get_results", {"run_id": "00000003"}),
        ("rl_list_runs", {}),
    ]
    failing = ("rl_test_inference", {"test_id": "ffffffff"})
    answers: list[tuple[str, dict[str, Any]]] = []
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        before = (await call("rl_get_current_config"))["revision"]

        async def ask(tool: str, arguments: dict[str, Any]) -> None:
            answer = await call.raw(tool, arguments)
            content = answer.structured_content
            assert content is not None
            assert answer.is_error in (False, tool in (failing[0], "rl_edit_config")), content
            answers.append((tool, content))

        async with anyio.create_task_group() as tasks:
            for number in range(CALLS):
                tasks.start_soon(ask, *[*calls, failing][number % 10])
        after = await call("rl_get_current_config")
    assert Counter(tool for tool, _ in answers) == dict.fromkeys([tool for tool, _ in [*calls, failing]], CALLS // 10)
    by_tool: dict[str, list[dict[str, Any]]] = {}
    for tool, answer in answers:
        by_tool.setdefault(tool, []).append(answer)
    for tool in ("rl_list_environments", "rl_start_training", "rl_stop_training", "rl_get_results", "rl_list_runs"):
        assert all(answer == by_tool[tool][0] for answer in by_tool[tool]), tool
    assert {answer["run_id"] for answer in by_tool["rl_start_training"]} == {"00000001"}
    assert {answer["count"] for answer in by_tool["rl_list_runs"]} == {RUNS}, "no run was started"
    edits = [answer for answer in by_tool["rl_edit_config"] if "error" not in answer]
    refused = [answer for answer in by_tool["rl_edit_config"] if "error" in answer]
    assert all("selected" in answer["error"] and answer["hint"] for answer in refused), "selected anew in between"
    changes = [answer["revision"] for answer in [*by_tool["rl_select_environment"], *edits]]
    assert sorted(changes) == list(range(before + 1, before + len(changes) + 1)), "every change counts once"
    assert after["revision"] == before + len(changes)
    json.loads(home.session_file.read_text())
    assert not list(home.rl.rglob("*.tmp*"))


async def test_fifty_edits_at_once_are_all_kept(environ: dict[str, str], tmp_path: Path) -> None:
    environment_file(tmp_path / "envs")
    rates = [round(1e-5 * number, 6) for number in range(1, CALLS + 1)]
    answers: list[dict[str, Any]] = []
    async with in_memory(environ, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        before = (await call("rl_get_current_config"))["revision"]

        async def edit(rate: float) -> None:
            answers.append(await call("rl_edit_config", field="learning_rate", value=rate))

        async with anyio.create_task_group() as tasks:
            for rate in rates:
                tasks.start_soon(edit, rate)
        after = await call("rl_get_current_config")
    last = max(answers, key=lambda answer: int(answer["revision"]))
    assert sorted(answer["revision"] for answer in answers) == list(range(before + 1, before + CALLS + 1))
    assert all(answer["config"]["learning_rate"] == answer["value"] for answer in answers), "each was told of its own"
    [field] = [one for one in after["configurable_fields"] if one["name"] == "learning_rate"]
    assert (field["current_value"], after["revision"]) == (last["value"], before + CALLS)

"""What a user's agent does with the server, step by step, through any client library. Every step says what it expects.

``glance`` takes no training run; ``whole`` does one, from choosing an environment to the results of what it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wire import Answer, Wire

TOOLS = {
    *("rl_list_environments", "rl_select_environment", "rl_get_current_config", "rl_edit_config"),
    *("rl_start_training", "rl_check_status", "rl_stop_training", "rl_get_results", "rl_list_runs"),
    "rl_test_inference",
}
SETTINGS = {"model_name": "builtin:tiny", "group_size": 4, "batch_size": 8, "total_steps": 5000}
"""A run that goes on until it is stopped."""
TIMEOUT_S = 240
"""For each wait; a step takes a second on an idle machine."""
TRIES = 5
"""Of a call that is to wait: where there is news already, as after a slow subscription, it answers at once."""
PNG = b"\x89PNG\r\n\x1a\n"


async def ask(wire: Wire, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await wire.call(tool, arguments)
    assert not answer.failed, f"{tool}: {answer.text}"
    assert answer.text, f"{tool} answered without a text"
    return answer.data


async def refused(wire: Wire, tool: str, **arguments: Any) -> Answer:
    answer = await wire.call(tool, arguments)
    assert answer.failed, f"{tool} took {arguments}"
    assert answer.data["error"]
    return answer


def source(path: str) -> str:
    return Path(path).read_text()


def folders(paths: list[str]) -> bool:
    return all(Path(path).is_dir() for path in paths)


async def glance(wire: Wire) -> dict[str, Any]:
    """Lists, choices, an edit, an error, what can be read and what is offered."""
    assert set(await wire.tools()) == TOOLS
    listed = await ask(wire, "rl_list_environments")
    [path] = [info["file_path"] for info in listed["environments"] if info["name"] == "arithmetic"]
    assert (await ask(wire, "rl_select_environment", name="arithmetic"))["environment"] == "arithmetic"
    assert (await ask(wire, "rl_edit_config", field="total_steps", value=7))["value"] == 7
    config = await ask(wire, "rl_get_current_config")
    [steps] = [field for field in config["configurable_fields"] if field["name"] == "total_steps"]
    assert steps["current_value"] == 7
    assert "total_steps" in (await refused(wire, "rl_edit_config", field="steps", value=1)).data["available_fields"]
    assert "ffffffff" in (await refused(wire, "rl_check_status", run_id="ffffffff")).text
    assert "runs" in await ask(wire, "rl_list_runs")
    uris = await wire.resources()
    assert "rl://environments/arithmetic/source" in uris
    assert await wire.read("rl://environments/arithmetic/source") == source(path)
    assert any("{run_id}" in template for template in await wire.templates())
    named = await wire.complete("rl://environments/{name}/source", "name", "arith")
    assert named == ["arithmetic"], named
    prompts = await wire.prompts()
    assert {"train_model", "create_environment", "diagnose_run", "compare_runs"} <= set(prompts)
    assert prompts["train_model"] == ["goal"]
    assert "longer sums" in await wire.prompt("train_model", {"goal": "longer sums", "environment": "arithmetic"})
    return {"revision": wire.revision, "resources": len(uris), "prompts": sorted(prompts)}


async def whole(wire: Wire) -> dict[str, Any]:
    """Select, configure, start, wait, read the log, look at the plot, stop, results."""
    await ask(wire, "rl_select_environment", name="arithmetic")
    for field, value in SETTINGS.items():
        await ask(wire, "rl_edit_config", field=field, value=value)
    begun = await ask(wire, "rl_start_training")
    run_id: str = begun["run_id"]
    notes: list[str] = []
    try:
        await _train(wire, run_id, notes)
    finally:
        await ask(wire, "rl_stop_training", run_id=run_id)
    ended = await until(wire, run_id, lambda status: status["status"] not in ("running", "stopping"))
    assert ended["status"] == "stopped", ended
    results = await ask(wire, "rl_get_results", run_id=run_id, include=["checkpoints", "metrics", "events"])
    assert results["steps"] >= 2
    assert results["checkpoints"], "a stopped run leaves a checkpoint"
    assert folders(results["checkpoints"])
    assert [run["run_id"] for run in (await ask(wire, "rl_list_runs"))["runs"]] == [run_id]
    assert run_id in await wire.prompt("diagnose_run", {"run_id": run_id})
    state = json.loads(str(await wire.read(f"rl://runs/{run_id}/state")))
    assert state["status"] == "stopped"
    return {"revision": wire.revision, "steps": results["steps"], "notes": len(notes)}


async def _train(wire: Wire, run_id: str, notes: list[str]) -> None:
    async def noted(_done: float, _total: float | None, message: str | None) -> None:
        notes.append(message or "")

    await until(wire, run_id, lambda status: status["status"] == "running")
    async with wire.watch(f"rl://runs/{run_id}/metrics") as changed:
        for _ in range(TRIES):
            answer = await wire.call("rl_check_status", {"run_id": run_id, "wait_seconds": 20}, noted)
            assert not answer.failed, answer.text
            if notes:
                break
        await until(wire, run_id, lambda status: (status["metrics"]["step"] or 0) >= 2 and bool(changed))
    assert notes, "a call that waits says what it waits for"
    assert set(changed) == {f"rl://runs/{run_id}/metrics"}
    status = await wire.call("rl_check_status", {"run_id": run_id, "include": ["log", "plot", "metrics", "rollouts"]})
    assert not status.failed, status.text
    [(mime_type, picture)] = status.images
    assert mime_type == "image/png"
    assert picture.startswith(PNG)
    log = await wire.read(f"rl://runs/{run_id}/logs/trainer?offset=0&limit=400")
    assert isinstance(log, str)
    assert log
    drawn = await wire.read(f"rl://runs/{run_id}/plot")
    assert isinstance(drawn, bytes)
    assert drawn.startswith(PNG)


async def until(wire: Wire, run_id: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        status = await ask(wire, "rl_check_status", run_id=run_id, wait_seconds=5)
        assert status["status"] != "failed", status
        if reached(status):
            return status
    raise AssertionError(f"run {run_id} did not get there in {TIMEOUT_S} s: {status}")


SCENARIOS = {"glance": glance, "whole": whole}

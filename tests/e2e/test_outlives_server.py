"""A run belongs to no server: it goes on when the one that started it is gone, and any other can see and stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

TINY = {"model_name": "builtin:tiny", "group_size": 4, "batch_size": 8}


async def _start(call: Callable[..., Any], total_steps: int) -> str:
    await call("rl_select_environment", name="arithmetic")
    for field, value in {**TINY, "total_steps": total_steps}.items():
        await call("rl_edit_config", field=field, value=value)
    run_id: str = (await call("rl_start_training"))["run_id"]
    return run_id


async def _until(call: Callable[..., Any], run_id: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    with anyio.fail_after(300):
        while True:
            status: dict[str, Any] = await call("rl_check_status", run_id=run_id, wait_seconds=5)
            assert status["status"] != "failed", status
            if reached(status):
                return status


@pytest.mark.anyio
@pytest.mark.timeout(900)
async def test_a_run_goes_on_without_its_server_and_a_new_one_lists_follows_and_stops_it(
    connect: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        run_id = await _start(call, 5000)
        before = await _until(call, run_id, lambda status: (status["metrics"]["step"] or 0) >= 1)
    # Leaving the block closed stdin and ended the server the way the SDK does.
    async with connect() as call:
        listed = (await call("rl_list_runs"))["runs"]
        assert [(run["run_id"], run["status"]) for run in listed] == [(run_id, "running")]
        step = before["metrics"]["step"]
        await _until(call, run_id, lambda status: status["metrics"]["step"] > step)
        await call("rl_stop_training", run_id=run_id)
        stopped = await _until(call, run_id, lambda status: status["status"] not in ("running", "stopping"))
        assert stopped["status"] == "stopped"
    assert processes_left() == []


@pytest.mark.anyio
@pytest.mark.timeout(900)
@pytest.mark.slow
async def test_a_run_that_ends_while_no_server_lives_is_completed_by_its_own_proof(
    connect: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        run_id = await _start(call, 4)
    assert await anyio.to_thread.run_sync(processes_left, 300) == []
    async with connect() as call:
        listed = (await call("rl_list_runs"))["runs"]
        assert [(run["run_id"], run["status"], run["step"]) for run in listed] == [(run_id, "completed", 4)]
        results = await call("rl_get_results", run_id=run_id)
        assert (results["steps"], results["error"]) == (4, None)
        assert results["adapter_path"]

"""No call of a tool goes on for longer than a client waits, and one that waits says how it goes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from live_run import RUN_ID, LiveRun
from mcp_rig import in_memory

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.server import handling

CALLS = {
    "rl_list_environments": ("list_environments", {}),
    "rl_select_environment": ("select_environment", {"name": "own"}),
    "rl_get_current_config": ("get_current_config", {}),
    "rl_edit_config": ("edit_config", {"field": "level", "value": 1}),
    "rl_start_training": ("start_training", {}),
    "rl_check_status": ("check_status", {"run_id": RUN_ID}),
    "rl_stop_training": ("stop_training", {"run_id": RUN_ID}),
    "rl_get_results": ("get_results", {"run_id": RUN_ID}),
    "rl_list_runs": ("list_runs", {}),
    "rl_test_inference": ("test_inference", {}),
}


@pytest.fixture
def live(environ: dict[str, str]) -> Iterator[LiveRun]:
    made = LiveRun(Home(Path(environ["HERMES_HOME"])))
    yield made
    assert made.lock is not None
    made.lock.release()


@pytest.mark.anyio
async def test_each_of_the_ten_ends_in_time_with_a_next_step_whatever_hangs(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object, **__: object) -> None:
        await anyio.sleep(math.inf)

    assert handling.MAX_WAIT_S <= 50
    monkeypatch.setattr(handling, "MAX_WAIT_S", 0.05)
    for operation, _ in CALLS.values():
        monkeypatch.setattr(Operations, operation, hang)
    async with in_memory(environ) as call:
        assert set(CALLS) == set(call.listed)
        for tool, (_, arguments) in CALLS.items():
            with anyio.fail_after(30):
                error = await call.error(tool, **arguments)
            assert "too slow" in error["error"], tool
            assert "Call it again" in error["hint"], tool


@pytest.mark.anyio
async def test_a_call_that_waits_says_how_it_goes_and_comes_back_with_the_next_step(
    environ: dict[str, str], live: LiveRun
) -> None:
    notes: list[tuple[float, str]] = []
    stepped = anyio.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        notes.append((progress, message or ""))
        if not stepped.is_set():
            live.step(1)
            stepped.set()

    async with in_memory(environ, profile="local") as call:
        with anyio.fail_after(60):
            answer = await call.client.call_tool(
                "rl_check_status", {"run_id": RUN_ID, "wait_seconds": 50}, progress_callback=note
            )
    assert answer.structured_content is not None
    assert answer.structured_content["metrics"]["step"] == 1
    assert "step 0 of 10" in notes[0][1]
    assert [count for count, _ in notes] == sorted({count for count, _ in notes}), "each above the last"


@pytest.mark.anyio
async def test_an_argument_that_a_tool_does_not_have_is_refused_and_nothing_done(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        error = await call.error("rl_start_training", resume_form="12345678")
        assert "no argument 'resume_form'; nothing was done" in error["error"]
        assert "Did you mean 'resume_from'?" in error["hint"]
        assert (await call("rl_list_runs"))["count"] == 0

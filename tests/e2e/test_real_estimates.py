"""What is said before a run of the embedded model against what it then took; and W&B without a key beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from estimate_check import assert_within_a_factor_of_two, dry_run

STEPS = 15


async def _finished(call: Callable[..., Any], run_id: str) -> dict[str, Any]:
    with anyio.fail_after(300):
        while True:
            status: dict[str, Any] = await call("rl_check_status", run_id=run_id, wait_seconds=20)
            if status["status"] in ("completed", "failed", "stopped", "interrupted"):
                return status


async def _select(call: Callable[..., Any], **edits: Any) -> None:
    await call("rl_select_environment", name="arithmetic")
    for field, value in {"model_name": "builtin:tiny", "total_steps": STEPS, **edits}.items():
        await call("rl_edit_config", field=field, value=value)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_the_embedded_model_takes_what_was_said_within_a_factor_of_two_in_a_first_and_in_a_second_run(
    environ: dict[str, str], connect: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        await _select(call)
        before = await dry_run(call)
        assert "measurement of this machine" in before["basis"], before
        run_id = (await call("rl_start_training"))["run_id"]
        first = await call("rl_check_status", run_id=run_id)
        assert first["eta_seconds"] == pytest.approx(before["total_seconds"], rel=1.0), "from the estimate so far"
        assert (await _finished(call, run_id))["status"] == "completed"
        results = await call("rl_get_results", run_id=run_id)
        assert results["estimate"] == before, "the start said what the dry run had said"
        by_itself = await dry_run(call)
        assert f"run {run_id}" in by_itself["basis"]
        assert_within_a_factor_of_two(results["actual"], by_itself)
    async with connect(HERMES_HOME=f"{environ['HERMES_HOME']}-other") as call:
        await _select(call)
        after = await dry_run(call)
        assert "measurement of this machine" in after["basis"], after
    assert_within_a_factor_of_two(results["actual"], before, after)
    assert processes_left() == []


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_fi_28_a_run_whose_wandb_has_no_key_trains_and_says_that_wandb_is_offline(
    connect: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        await _select(call, use_wandb=True, batch_size=16)
        run_id = (await call("rl_start_training"))["run_id"]
        status = await _finished(call, run_id)
        assert status["status"] == "completed", status
        assert status["wandb_error"].startswith("offline: "), status
        results = await call("rl_get_results", run_id=run_id, max_points=STEPS)
        assert [row["step"] for row in results["history"]] == list(range(1, STEPS + 1))
        assert results["wandb_error"] == status["wandb_error"]
    assert processes_left() == []

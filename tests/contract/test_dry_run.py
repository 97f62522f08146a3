"""rl_start_training(dry_run=true): every check of a start and an estimate, and nothing made. And the operator's
ceilings, which no tool can raise."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp_rig import Tools, in_memory

from hermes_rl_mcp.runs.claims import take_ticket


async def _select(call: Tools, **edits: Any) -> None:
    await call("rl_select_environment", name="arithmetic")
    for field, value in {"model_name": "builtin:tiny", **edits}.items():
        await call("rl_edit_config", field=field, value=value)


def _nothing_was_made(environ: dict[str, str]) -> None:
    rl = Path(environ["HERMES_HOME"]) / "rl"
    assert {path.name for path in rl.iterdir()} <= {"session.json", "session.lock", "cache"}
    assert not (Path(environ["HERMES_HOME"]) / "logs").exists()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # gone by now; supervisors of other tests have other homes
            words = child.cmdline()
            assert "hermes_rl_mcp.runs" not in words or not any(environ["HERMES_HOME"] in word for word in words)


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_dry_run_checks_and_estimates_by_a_measurement_and_makes_nothing(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        await _select(call, total_steps=40)
        answer = await call("rl_start_training", dry_run=True)
        assert (answer["dry_run"], answer["run_id"], answer["status"]) == (True, "", "not started")
        assert answer["queue_position"] is None
        assert answer["config"]["total_steps"] == 40
        estimate = answer["estimate"]
        assert "a measurement of this machine" in estimate["basis"]
        assert estimate["sampled_tokens"] == 40 * 64 * 4, "the environment's own word"
        assert estimate["gpu_memory_bytes"] is None
        assert 200 * 2**20 < estimate["memory_bytes"] < 2 * 2**30
        assert 0 < estimate["seconds_per_step"] < estimate["total_seconds"]
        _nothing_was_made(environ)
        kept = list((Path(environ["HERMES_HOME"]) / "rl" / "cache" / "speed").iterdir())
        again = await call("rl_start_training", dry_run=True)
        assert again["estimate"] == estimate, "measured once"
        assert list((Path(environ["HERMES_HOME"]) / "rl" / "cache" / "speed").iterdir()) == kept
        assert (await call("rl_list_runs"))["count"] == 0


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_dry_run_says_its_place_in_the_queue_and_disturbs_no_run_with_a_measurement(
    environ: dict[str, str],
) -> None:
    ticket = take_ticket(Path(environ["HERMES_RL_CLAIMS_DIR"]), "cpu", "0123abcd")
    try:
        async with in_memory(environ) as call:
            await _select(call)
            answer = await call("rl_start_training", dry_run=True)
            assert answer["queue_position"] == 1 and "0123abcd" in answer["message"]
            assert answer["estimate"]["basis"].startswith("rough")
            _nothing_was_made(environ)
    finally:
        ticket.release()


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_start_says_what_another_server_changed_unseen(environ: dict[str, str]) -> None:
    ticket = take_ticket(Path(environ["HERMES_RL_CLAIMS_DIR"]), "cpu", "0123abcd")  # so that nothing is measured
    try:
        async with in_memory(environ) as call, in_memory(environ) as other:
            await _select(call, total_steps=5)
            assert (await call("rl_start_training", dry_run=True))["warnings"] == []
            await other("rl_edit_config", field="total_steps", value=9)
            [note] = (await call("rl_start_training", dry_run=True))["warnings"]
            assert "changed were total_steps (by server process" in note
            await other("rl_select_environment", name="gsm8k")
            await other("rl_edit_config", field="model_name", value="builtin:tiny")
            [note] = (await call("rl_start_training", dry_run=True))["warnings"]
            assert "environment 'gsm8k' was selected by server process" in note
            assert (await other("rl_start_training", dry_run=True))["warnings"] == []
    finally:
        ticket.release()


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_run_beyond_a_ceiling_is_refused_with_the_number_and_a_setting_that_fits(
    environ: dict[str, str],
) -> None:
    ticket = take_ticket(Path(environ["HERMES_RL_CLAIMS_DIR"]), "cpu", "0123abcd")  # so that nothing is measured
    limited = {**environ, "HERMES_RL_MAX_HOURS": "0.05"}
    try:
        async with in_memory(limited) as call:
            await _select(call, total_steps=10_000)
            assert (await call("rl_get_current_config"))["run_limits"] == {"max_hours": 0.05}
            error = await call.error("rl_start_training")
            assert await call.error("rl_start_training", dry_run=True) == error
            assert "the operator allows 0.05 hours (max_hours)" in error["error"]
            assert (error["ceiling"], error["allowed"]) == ("max_hours", 0.05)
            assert error["estimated"] > 0.05
            _nothing_was_made(environ)
            steps = int(error["hint"].split("Set total_steps to ")[1].split()[0])
            await call("rl_edit_config", field="total_steps", value=steps)
            assert (await call("rl_start_training", dry_run=True))["estimate"]["total_seconds"] <= 180
    finally:
        ticket.release()


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_a_dry_run_refuses_what_a_start_refuses(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        await _select(call, batch_size=10)
        assert "8 or 16" in (await call.error("rl_start_training", dry_run=True))["hint"]
        await _select(call, model_name="Qwen/Qwen3-0.6B")
        error = await call.error("rl_start_training", dry_run=True)
        assert "HF_HUB_OFFLINE" in error["error"] and error["model"] == "Qwen/Qwen3-0.6B"
        _nothing_was_made(environ)

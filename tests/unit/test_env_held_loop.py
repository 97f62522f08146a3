"""Code that blocks the event loop is named with its line, once; a loop that runs is left in peace."""

from __future__ import annotations

import asyncio
import time

import pytest

from hermes_rl_mcp.envs.held_loop import HeldLoop


def held(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "held the event loop" in one.getMessage()]


def test_a_hook_that_blocks_is_named_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    def slow_hook() -> None:
        deadline = time.monotonic() + 30
        while not held(caplog) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)

    async def run() -> None:
        async with HeldLoop(__file__, held_s=0.05, beat_s=0.01):
            await asyncio.sleep(0.02)
            slow_hook()

    asyncio.run(run())
    [line] = held(caplog)
    assert "test_env_held_loop.py:" in line and "(slow_hook)" in line


def test_a_loop_that_runs_is_left_in_peace(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with HeldLoop(__file__, held_s=20, beat_s=0.01):
            await asyncio.sleep(0.2)

    asyncio.run(run())
    assert not held(caplog)

"""Helper processes of operations: few at once, bounded in what they say, gone with the call that started them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest

from hermes_rl_mcp.operations.children import Finished, run_helper, turn


@pytest.mark.anyio
async def test_no_more_than_the_places_are_taken_at_once(tmp_path: Path) -> None:
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with turn(tmp_path / "turns", "kind", 2):
            inside += 1
            most = max(most, inside)
            await anyio.sleep(0.05)  # long enough for the others to try
            inside -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(work)
    assert most == 2


@pytest.mark.anyio
async def test_a_turn_is_had_where_no_lock_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with turn(tmp_path / "file" / "turns", "kind", 1):
        pass


@pytest.mark.anyio
async def test_what_a_helper_says_is_bounded_and_its_last_line_kept(tmp_path: Path) -> None:
    code = "import sys; print('x' * 10**6); print('warning\\nthe reason', file=sys.stderr); sys.exit(3)"
    done = await run_helper([sys.executable, "-c", code], os.environ, cwd=tmp_path, max_bytes=100)
    assert done == Finished(3, b"x" * 99 + b"\n", "the reason")


@pytest.mark.anyio
async def test_a_helper_and_what_it_started_end_with_the_call(tmp_path: Path) -> None:
    script = "sleep 60 & echo $! > pids; echo $$ >> pids; mv pids started; wait"
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                await run_helper(["sh", "-c", script], os.environ, cwd=tmp_path, max_bytes=100)

            tasks.start_soon(call)
            await _until((tmp_path / "started").exists)
            tasks.cancel_scope.cancel()
        pids = [int(pid) for pid in (tmp_path / "started").read_text().split()]
        await _until(lambda: not any(map(_lives, pids)))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - files and processes have no event to wait for
        await anyio.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

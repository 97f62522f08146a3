"""A disk that fills up under the real trainer: the run fails with that reason, what was saved is whole, and the server
goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from small_disk import SmallDisk

from hermes_rl_mcp.checkpoints import complete, inspect

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


@pytest.fixture
def environ(environ: dict[str, str], disk: SmallDisk) -> dict[str, str]:
    """The home lies on the small disk."""
    return {**environ, "HERMES_HOME": str(disk.folder / "hermes")}


async def test_fi_21_a_checkpoint_that_does_not_fit_fails_the_run_and_leaves_the_one_before_whole(
    connect: Callable[..., Any], disk: SmallDisk, processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        await call("rl_select_environment", name="arithmetic")
        for field, value in (("total_steps", 500), ("save_checkpoint_interval", 2), ("keep_checkpoints", 0)):
            await call("rl_edit_config", field=field, value=value)
        run_id = (await call("rl_start_training"))["run_id"]
        run_dir = disk.folder / "hermes" / "rl" / "runs" / run_id
        with anyio.fail_after(240):
            while not (saved := complete(run_dir / "checkpoints")):
                status = await call("rl_check_status", run_id=run_id)
                assert status["error"] is None, status
                await anyio.sleep(0.5)
        size = sum(file.stat().st_size for file in saved[0].path.rglob("*") if file.is_file())
        disk.shrink(size + size // 2)  # one more fits, another does not
        with anyio.fail_after(240):
            while (status := await call("rl_check_status", run_id=run_id, wait_seconds=5))["status"] != "failed":
                assert status["status"] in ("starting", "running", "stopping"), status
        assert "disk is full" in status["error"] and str(disk.folder) in status["error"], status["error"]
        last = complete(run_dir / "checkpoints")[-1]
        assert str(last.path) in status["error"] and "Free some space" in status["hint"]
        inspect(last.path)  # every byte of it, or this raises
        results = await call("rl_get_results", run_id=run_id)
        assert results["adapter_path"] == str(last.path / "adapter") and results["steps"] >= last.marker.step
        assert [run["status"] for run in (await call("rl_list_runs"))["runs"]] == ["failed"]
    assert processes_left() == []

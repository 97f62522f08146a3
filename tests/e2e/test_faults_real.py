"""Faults that strike a run of the real trainer, seen and handled by a client of the real MCP server.

The scripted children of tests/process show these cases in more variants; here nothing is scripted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import psutil
import pytest

from hermes_rl_mcp.checkpoints import last_complete
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.process import is_alive
from hermes_rl_mcp.runs.state import read_record

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]

TINY = {"model_name": "builtin:tiny", "device": "cpu", "lora_rank": 8, "group_size": 4, "batch_size": 8}
WAIT_S = 240
"""Only guards against hanging, on a machine that does other things as well."""
LEAVE_S = 60
"""A server has 2 s until the SDK's client signals it; how quickly it leaves an idle machine is tested elsewhere."""


class Runs:
    """What tests do with a home's runs through a server, and what its files say without one."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.home = Home.from_environ(environ)

    def paths(self, run_id: str) -> RunPaths:
        return self.home.run(run_id)

    def record(self, run_id: str) -> RunRecord:
        """As the supervisor wrote it: no reader has judged it."""
        return read_record(self.paths(run_id))

    def steps(self, run_id: str) -> list[int]:
        path = self.paths(run_id).metrics
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, process: str, run_id: str) -> str:
        return self.home.log(process, run_id).read_text(errors="replace")

    async def until(self, run_id: str, condition: Callable[[], object]) -> None:
        with anyio.fail_after(WAIT_S):
            while not condition():
                record = self.record(run_id)
                assert not record.status.terminal, f"{record.error}\n{self.log('trainer', run_id)[-4000:]}"
                await anyio.sleep(0.02)

    async def left_alone_until_its_end(self, run_id: str) -> RunRecord:
        """No server looks at it; its own supervisor writes how it ended, and goes."""
        with anyio.fail_after(WAIT_S):
            while True:
                record = self.record(run_id)
                assert record.supervisor is not None
                if record.status.terminal and not is_alive(record.supervisor):
                    return record
                await anyio.sleep(0.05)

    async def shown(self, call: Callable[..., Any], run_id: str, reached: Callable[[dict[str, Any]], bool]) -> Any:
        """The first status that fulfils the condition, as a client sees it."""
        with anyio.fail_after(WAIT_S):
            while not reached(status := await call("rl_check_status", run_id=run_id, wait_seconds=5)):
                pass
        return status


async def configure(call: Callable[..., Any], **edits: Any) -> None:
    await call("rl_select_environment", name="arithmetic")
    for field, value in {**TINY, **edits}.items():
        await call("rl_edit_config", field=field, value=value)


def server_of_this_test(environ: dict[str, str]) -> psutil.Process:
    """The one server process that this test's client has now."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another one, just gone
            if "hermes_rl_mcp.server" in child.cmdline() and child.environ()["HERMES_HOME"] == environ["HERMES_HOME"]:
                found.append(child)
    assert len(found) == 1, found
    return found[0]


@contextlib.asynccontextmanager
async def client_whose_server_dies(connect: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Its own complaints about that do not count."""
    with contextlib.suppress(Exception):
        async with connect() as call:
            yield call


@pytest.fixture
async def runs(environ: dict[str, str]) -> AsyncIterator[Runs]:
    made = Runs(environ)
    yield made
    for folder in made.home.runs.glob("????????"):  # of a test that failed midway
        record = made.record(folder.name)
        if not record.status.terminal and record.supervisor is not None and is_alive(record.supervisor):
            os.kill(record.supervisor.pid, signal.SIGTERM)
            await made.left_alone_until_its_end(folder.name)


async def test_fi_01_fi_02_fi_30_fi_34_real_run_is_started_once_outlives_its_servers_and_saves_itself(
    connect: Callable[..., Any], environ: dict[str, str], runs: Runs, processes_left: Callable[..., list[str]]
) -> None:
    # The client gave up waiting for its start and starts again, then once more from another server: one run.
    async with client_whose_server_dies(connect) as call:
        await configure(call, total_steps=5000)
        answers: list[str] = []

        async def start() -> None:
            answers.append((await call("rl_start_training", idempotency_key="the run of tonight"))["run_id"])

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(start)
        [run_id] = set(answers)
        await runs.until(run_id, lambda: runs.steps(run_id))
        seen = runs.paths(run_id).metrics.stat().st_size
        server_of_this_test(environ).kill()

    # A new server lists it under the same id, and the logs go on where they were read to.
    async with connect() as call:
        assert (await call("rl_start_training", idempotency_key="the run of tonight"))["run_id"] == run_id
        listed = (await call("rl_list_runs"))["runs"]
        assert [(run["run_id"], run["status"]) for run in listed] == [(run_id, "running")]
        at = max(runs.steps(run_id))
        await runs.shown(call, run_id, lambda status: (status["metrics"]["step"] or 0) > at)
        before = runs.record(run_id)
        server = server_of_this_test(environ)
        closing = anyio.current_time()
    # Leaving the block shut the server down as the SDK does.
    assert anyio.current_time() - closing < LEAVE_S and not server.is_running()
    after = runs.record(run_id)
    assert (after.status, after.supervisor) == ("running", before.supervisor)
    assert all(process.identity and is_alive(process.identity) for process in after.processes.values())
    at = max(runs.steps(run_id))
    await runs.until(run_id, lambda: max(runs.steps(run_id)) > at)
    with runs.paths(run_id).metrics.open() as file:
        file.seek(seen)
        later = [json.loads(line)["step"] for line in file if line.endswith("\n")]
    assert later == list(range(later[0], later[0] + len(later)))

    # The machine shuts down: its supervisor is asked to end, and the trainer saves what it has.
    assert after.supervisor is not None
    os.kill(after.supervisor.pid, signal.SIGTERM)
    record = await runs.left_alone_until_its_end(run_id)
    assert (record.status, record.error) == ("stopped", None) and "SIGTERM" in (record.stop_reason or "")
    assert record.processes["trainer"].exit_code == 128 + signal.SIGTERM
    assert await anyio.to_thread.run_sync(processes_left) == []
    saved = last_complete(runs.paths(run_id).checkpoints)
    assert saved is not None and saved.name == f"step_{max(runs.steps(run_id))}", "nothing that it learned is lost"

    async with connect() as call:
        results = await call("rl_get_results", run_id=run_id)
        assert results["adapter_path"] == str(saved / "adapter") and results["status"] == "stopped"
        # It is good to go on from.
        again: str = (await call("rl_start_training", resume_from=run_id))["run_id"]
        await runs.shown(call, again, lambda status: (status["metrics"]["step"] or 0) > max(runs.steps(run_id)))
        await call("rl_stop_training", run_id=again)
        await runs.shown(call, again, lambda status: status["status"] == "stopped")
    assert await anyio.to_thread.run_sync(processes_left) == []


async def test_fi_06_real_trainer_that_is_killed_fails_the_run_with_the_signal_and_takes_the_rest_along(
    connect: Callable[..., Any], runs: Runs, processes_left: Callable[..., list[str]]
) -> None:
    async with connect() as call:
        await configure(call, total_steps=5000)
        run_id: str = (await call("rl_start_training"))["run_id"]
        await runs.until(run_id, lambda: runs.steps(run_id))
        trainer = runs.record(run_id).processes["trainer"].identity
        assert trainer is not None
        os.kill(trainer.pid, signal.SIGKILL)
        status = await runs.shown(call, run_id, lambda status: status["status"] not in ("running", "stopping"))
        assert status["status"] == "failed" and "signal 9" in status["error"]
        assert "memory" in status["hint"]
        assert status["processes"]["trainer"] == "exited (-9)"
        assert [status["processes"][name].split()[0] for name in ("api", "env")] == ["exited", "exited"]
    assert await anyio.to_thread.run_sync(processes_left) == []


async def test_fi_04_real_run_that_completes_while_no_server_lives_is_completed_with_its_adapter(
    connect: Callable[..., Any], environ: dict[str, str], runs: Runs
) -> None:
    async with client_whose_server_dies(connect) as call:
        await configure(call, total_steps=4)
        run_id: str = (await call("rl_start_training"))["run_id"]
        server_of_this_test(environ).kill()
    assert not runs.record(run_id).status.terminal, "it ended too early to show anything"
    await runs.left_alone_until_its_end(run_id)
    async with connect() as call:
        listed = (await call("rl_list_runs"))["runs"]
        assert [(run["run_id"], run["status"], run["step"]) for run in listed] == [(run_id, "completed", 4)]
        results = await call("rl_get_results", run_id=run_id)
        assert (results["steps"], results["error"]) == (4, None)
        assert results["adapter_path"] == str(runs.paths(run_id).checkpoints / "step_4" / "adapter")
        assert (await call("rl_check_status", run_id=run_id))["processes"]["trainer"] == "exited (0)"


async def test_fi_05_real_trainer_that_crashes_while_no_server_lives_has_failed_with_its_reason(
    connect: Callable[..., Any], environ: dict[str, str], runs: Runs
) -> None:
    async with client_whose_server_dies(connect) as call:
        await configure(call, total_steps=5000, save_checkpoint_interval=3)
        run_id: str = (await call("rl_start_training"))["run_id"]
        server_of_this_test(environ).kill()
    runs.paths(run_id).checkpoints.write_text("in the way of the trainer's folder")
    await runs.left_alone_until_its_end(run_id)
    async with connect() as call:
        status = await call("rl_check_status", run_id=run_id)
        assert (status["status"], status["processes"]["trainer"]) == ("failed", "exited (1)")
        assert "checkpoint" in status["error"].lower() and "step" in status["error"]
        results = await call("rl_get_results", run_id=run_id)
        assert (results["adapter_path"], results["checkpoints"]) == (None, [])
        assert results["steps"] >= 2, "what it did before is not lost"


@pytest.mark.parametrize("early", [True, False], ids=["before the last step", "after the last step"])
async def test_fi_36_real_run_that_is_stopped_as_it_completes_has_one_end(
    connect: Callable[..., Any], runs: Runs, early: bool
) -> None:
    steps = 6
    async with connect() as call, connect() as other:
        await configure(call, total_steps=steps)
        run_id: str = (await call("rl_start_training"))["run_id"]
        await runs.until(run_id, lambda: len(runs.steps(run_id)) >= (steps - 1 if early else steps))
        async with anyio.create_task_group() as group:
            for server in (call, other):
                group.start_soon(lambda server=server: server("rl_stop_training", run_id=run_id, confirm=True))
        status = await runs.shown(other, run_id, lambda status: status["status"] in ("stopped", "completed"))
        record = runs.paths(run_id).record.read_bytes()
        answer = await call("rl_stop_training", run_id=run_id)
        assert answer["status"] == status["status"] and "is not running" in answer["message"]
        assert (await call("rl_check_status", run_id=run_id))["status"] == status["status"]
        assert runs.paths(run_id).record.read_bytes() == record, "nothing was written after the end"
        ends = [json.loads(line)["status"] for line in runs.paths(run_id).events.read_text().splitlines()]
        assert [end for end in ends if end in ("stopped", "completed", "failed", "interrupted")] == [status["status"]]
        results = await call("rl_get_results", run_id=run_id)
        proof = runs.paths(run_id).report("trainer").exists()
        assert (status["status"] == "completed") == (proof and results["steps"] == steps)
        assert results["adapter_path"] and results["error"] is None

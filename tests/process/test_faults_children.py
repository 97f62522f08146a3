"""Processes of a run that are killed for memory, fail in a cascade, or are told to stop: the first cause is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_rig import HOLD, Rig, until

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.operations import training
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.paths import install_root
from hermes_rl_mcp.runs.resume import find_source

pytestmark = pytest.mark.anyio
_MIB = 2**20


async def test_fi_06_a_trainer_that_is_killed_fails_the_run_with_the_signal_and_takes_the_others_along(
    rig: Rig,
) -> None:
    run_id = await rig.start(HOLD)
    record = await rig.running(run_id)
    trainer = record.processes["trainer"].identity
    assert trainer is not None
    os.kill(trainer.pid, signal.SIGKILL)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED
    assert record.error is not None and record.error.startswith("The trainer was killed by signal 9 (SIGKILL).")
    assert record.hint is not None and record.hint.startswith("Killed from outside") and "Host memory?" in record.hint
    assert record.processes["trainer"].exit_code == -signal.SIGKILL and not record.processes["trainer"].forced
    assert all(process.exit_code is not None for process in record.processes.values())
    assert not rig.marked(run_id) and record.leftover_pids == []


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A memory-limited control group of this test's own, of whichever generation the machine has."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").is_file()
    folder = (root if v2 else root / "memory") / f"hermes-rl-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        limit = folder / ("memory.max" if v2 else "memory.limit_in_bytes")
        limit.write_text(str(600 * _MIB))
        swap = folder / ("memory.swap.max" if v2 else "memory.memsw.limit_in_bytes")
        if swap.exists():
            swap.write_text("0" if v2 else str(600 * _MIB))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield folder
    deadline = time.monotonic() + 60
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:  # its last process is still leaving
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_fi_06_the_kernels_out_of_memory_killer_is_named_as_evidence(rig: Rig, control_group: Path) -> None:
    request = rig.request()
    spec = rig.folder / "request.json"
    spec.write_text(request.model_dump_json())
    program = (
        "import sys, os, anyio\n"
        "from pathlib import Path\n"
        "from hermes_rl_mcp.contracts.runs import RunRequest\n"
        "from hermes_rl_mcp.paths import Home\n"
        "from hermes_rl_mcp.runs import launch\n"
        "Path(sys.argv[2], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "request = RunRequest.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "anyio.run(launch.start, Home.from_environ(os.environ), request, dict(os.environ))\n"
    )
    rig.started.append(request.run_id)
    environ = rig.script({"trainer": {"eat_memory": 2000 * _MIB}})
    subprocess.run(  # noqa: ASYNC221 - nothing else runs here
        [sys.executable, "-c", program, str(spec), str(control_group)],
        env={**environ, "PYTHONPATH": str(install_root())},
        check=True,
        timeout=120,
    )
    await rig.running(request.run_id)
    rig.go(request.run_id)
    record = await rig.end(request.run_id)
    assert record.status is RunStatus.FAILED
    assert "The trainer was killed by signal 9" in (record.error or "")
    # Of the whole machine there may have been more: it does other things, too.
    assert re.search(r"\d+ out-of-memory kills? meanwhile, 1 in the run's own control group", record.hint or "")


@pytest.mark.parametrize("asleep", [False, True], ids=["one after the other", "all dead when it looks"])
async def test_fi_08_the_first_to_die_is_named_not_the_cascade_and_the_last_checkpoint_is_reported(
    rig: Rig, asleep: bool
) -> None:
    knobs = {
        "api": {"die_on_go": 7, "say": "the disk of the rollout API is broken\n"},
        "trainer": {"hang_at": 2, "checkpoint_every": 1, "die_with_api": 11, "say": "connection refused\n"},
        "env": {"die_with_api": 12},
    }
    request = rig.request(env={"total_steps": 4, "group_size": 2, "batch_size": 4, "max_token_length": 16})
    run_id = await rig.start(knobs, request)
    record = await rig.running(run_id)
    await rig.wait(run_id, lambda _: (rig.paths(run_id).checkpoints / "step_2" / "complete.json").exists())
    assert record.supervisor is not None
    if asleep:
        os.kill(record.supervisor.pid, signal.SIGSTOP)
    rig.go(run_id)
    if asleep:
        await until(lambda: not rig.marked(run_id))
        os.kill(record.supervisor.pid, signal.SIGCONT)
    record = await rig.end(run_id)
    assert record.status is RunStatus.FAILED
    assert record.error == (
        "The rollout API exited with code 7. Its last log line: the disk of the rollout API is broken"
    )
    assert not rig.marked(run_id) and record.leftover_pids == []
    codes = {name: process.exit_code for name, process in record.processes.items()}
    assert None not in codes.values() and (not asleep or codes == {"api": 7, "trainer": 11, "env": 12})
    results = await training.get_results(Context(load_settings(rig.environ)), run_id)
    assert results.error == record.error
    assert results.hint is not None and f"resume_from='{run_id}'" in results.hint
    assert results.checkpoints[-1] == str(rig.paths(run_id).checkpoints / "step_2")
    assert results.adapter_path == f"{results.checkpoints[-1]}/adapter"
    (rig.paths(run_id).checkpoints / "step_2" / "adapter" / "adapter_model.safetensors").write_bytes(b"cut")
    results = await training.get_results(Context(load_settings(rig.environ)), run_id)
    assert results.adapter_path == f"{results.checkpoints[-2]}/adapter", "one that was cut short is not handed out"


async def test_fi_30_sigterm_to_the_supervisor_lets_the_trainer_checkpoint_and_can_be_resumed(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"hold_at": 2, "checkpoint_every": 100}})
    record = await rig.wait(run_id, lambda _: len(rig.store.metrics(run_id).lines) == 2)
    assert not rig.store.checkpoints(run_id) and record.supervisor is not None
    os.kill(record.supervisor.pid, signal.SIGTERM)
    record = await rig.end(run_id)
    assert record.status is RunStatus.STOPPED and "SIGTERM" in (record.stop_reason or "")
    assert record.error is None and record.processes["trainer"].exit_code == 143
    [checkpoint] = rig.store.checkpoints(run_id)
    assert checkpoint.marker.step == 2
    assert find_source(rig.home, run_id).step == 2, "it can be continued from there"
    assert not rig.marked(run_id)


async def test_fi_30_a_trainer_that_does_not_answer_sigterm_is_not_waited_for_beyond_the_bound(rig: Rig) -> None:
    run_id = await rig.start({"trainer": {"hold_at": 1, "ignore_term": True}}, trainer_term_s=0.5)
    record = await rig.running(run_id)
    assert record.supervisor is not None
    os.kill(record.supervisor.pid, signal.SIGTERM)
    record = await rig.end(run_id)
    assert record.status is RunStatus.STOPPED
    assert record.processes["trainer"].exit_code == -signal.SIGKILL and record.processes["trainer"].forced

"""A test run that is killed leaves nothing behind, although it cannot clean up any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hermes_rl_mcp.paths import install_root

TESTS = install_root() / "tests"
HELD = 9
"""Two rollout APIs by hand, one of three_processes, an environment, an HTTP server; a run's supervisor and children."""


def marked(value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HERMES_RL_TEST_MARK") == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


def children_of(test_run: int, mark: str) -> list[psutil.Process]:
    return [process for process in marked(mark) if process.pid != test_run]


def has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def until(condition: Callable[[], object], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigkill_of_a_test_run_ends_every_process_that_it_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    log = tmp_path / "pytest.log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", str(TESTS / "process" / "held_processes.py")),
                *("-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "-x"),
            ],
            env={
                **os.environ,
                "HELD_READY": str(ready),
                "PYTHONPATH": os.pathsep.join(str(TESTS / name) for name in ("contract", "process")),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert until(lambda: has_text(ready) or run.poll() is not None, 300) and ready.exists(), log.read_text()
        mark = ready.read_text()
        # A process that one of them only starts for a moment does not count.
        assert until(lambda: len(children_of(run.pid, mark)) == HELD, 60), children_of(run.pid, mark)
        held = children_of(run.pid, mark)
    finally:
        run.kill()
        run.wait()
    gone = until(lambda: not marked(mark), 60)
    left = [" ".join(process.cmdline()) for process in marked(mark)]
    for process in held:
        if process.is_running():
            process.kill()
    assert gone, left

"""A home whose runs are carried out by a real supervisor over scripted children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.runs import Event, RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.files import now, read_tail
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.process import signal_process
from hermes_rl_mcp.runs.store import RunStore

FAKE_CHILD = Path(__file__).with_name("fake_child.py")
PATIENT = {
    "api_ready_s": 100,
    "trainer_ready_s": 100,
    "env_ready_s": 100,
    "completion_exit_s": 60,
    "env_term_s": 60,
    "trainer_term_s": 60,
    "api_term_s": 60,
    "kill_s": 20,
}
"""Scripted children take milliseconds for all of this, unless the machine is busy. A test whose child hangs or ignores
what it is told names a shorter bound."""
Knobs = dict[str, dict[str, Any]]


async def until(
    condition: Callable[[], object], timeout_s: float = 60, found: Callable[[], str] = lambda: "not in time"
) -> None:
    """Returns once the condition is true; else fails with what was ``found`` instead."""
    with anyio.move_on_after(timeout_s):
        while True:
            if condition():
                return
            await anyio.sleep(0.02)
    raise TimeoutError(found())


def zombies() -> list[psutil.Process]:
    """Children of this process that nobody has waited for."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


class Rig:
    """Starts runs of scripted children in one home, and ends what is left of them."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = environ
        self.home = Home.from_environ(environ)
        self.store = RunStore(self.home)
        self.started: list[str] = []
        self.env_file = folder / "fake_env.py"
        self.env_file.write_text("class Fake: ...\n")

    def script(self, knobs: Knobs | None = None, **limits: float) -> dict[str, str]:
        """Environment for a launcher whose runs behave as ``knobs`` say."""
        number = len(list(self.folder.glob("knobs_*.json")))
        knobs_file = self.folder / f"knobs_{number}.json"
        knobs_file.write_text(json.dumps({**(knobs or {}), "tests_pid": os.getpid()}))
        commands = {
            role: [sys.executable, str(FAKE_CHILD), role, str(knobs_file)] for role in ("api", "trainer", "env")
        }
        commands_file = self.folder / f"commands_{number}.json"
        commands_file.write_text(json.dumps({"commands": commands, "limits": {**PATIENT, **limits}}))
        return {**self.environ, "HERMES_RL_CHILD_COMMANDS": str(commands_file)}

    def request(self, **changes: Any) -> RunRequest:
        values: dict[str, Any] = {
            "run_id": launch.new_run_id(),
            "created_at": now(),
            "environment": "fake",
            "env_file": str(self.env_file),
            "env_class": "Fake",
            "env_sha256": "0" * 64,
            "profile": "local",
            "base_model": "builtin:tiny",
            "model_path": str(self.home.model_dir("builtin:tiny")),
            "tokenizer_name": str(self.home.model_dir("builtin:tiny")),
            "env": {"total_steps": 3, "group_size": 2, "batch_size": 4, "max_token_length": 16},
            "trainer": TrainerConfig(),
        }
        return RunRequest.model_validate({**values, **changes})

    async def start(self, knobs: Knobs | None = None, request: RunRequest | None = None, **limits: float) -> str:
        record = await launch.start(self.home, request or self.request(), self.script(knobs, **limits))
        self.started.append(record.run_id)
        return record.run_id

    def paths(self, run_id: str) -> RunPaths:
        return self.home.run(run_id)

    async def wait(self, run_id: str, condition: Callable[[RunRecord], bool], timeout_s: float = 100) -> RunRecord:
        """The first record that fulfils the condition."""
        with anyio.fail_after(timeout_s):
            while True:
                record = self.store.get(run_id)
                if condition(record):
                    return record
                assert not record.status.terminal, f"ended as {record.status}: {record.error}\n{self.explain(run_id)}"
                await anyio.sleep(0.02)

    async def end(self, run_id: str, timeout_s: float = 100) -> RunRecord:
        """The terminal record."""
        return await self.wait(run_id, lambda record: record.status.terminal, timeout_s)

    def go(self, run_id: str) -> None:
        """Releases what the knobs hold back."""
        (self.paths(run_id).dir / "go").touch()

    async def running(self, run_id: str) -> RunRecord:
        return await self.wait(run_id, lambda record: record.status is RunStatus.RUNNING)

    def events(self, run_id: str) -> list[Event]:
        return [Event.model_validate_json(line) for line in self.paths(run_id).events.read_text().splitlines()]

    def explain(self, run_id: str) -> str:
        return "\n".join(self.log_tail(run_id, name) for name in ("supervisor", "api", "trainer", "env"))

    def log_tail(self, run_id: str, process: str, max_bytes: int = 8192) -> str:
        return read_tail(self.home.log(process, run_id), max_bytes)

    def marked(self, run_id: str) -> list[psutil.Process]:
        """Live processes of this run, by the variable that they all inherit."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HERMES_RL_RUN_ID", "").startswith(run_id):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        """Ends supervisors of runs that a failed test left; their children follow by the lifeline."""
        for run_id in self.started:
            record = self.store.get(run_id) if self.paths(run_id).record.exists() else None
            if record and not record.status.terminal and record.supervisor:
                signal_process(record.supervisor, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(self.marked(run_id) for run_id in self.started):
            time.sleep(0.05)


@pytest.fixture
def rig(tmp_path: Path, environ: dict[str, str]) -> Iterator[Rig]:
    rig = Rig(tmp_path, environ)
    yield rig
    rig.close()


HOLD: Knobs = {"trainer": {"hold_at": 1}}
"""A run that stays ``running`` after its first step until ``go``."""

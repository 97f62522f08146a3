"""A run that is alive for every reader: a real record whose supervisor lock the test holds, and a clock."""

from __future__ import annotations

import json
from typing import Any

from run_parts import SIZES, run_request

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.files import append_line, now
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState

RUN_ID = "0123abcd"
LIMIT_S = 1800.0


class LiveRun:
    """A run that is alive for every reader, and a clock."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.paths = home.run(RUN_ID)
        self.time = 1_000_000.0
        self.paths.dir.mkdir(parents=True)
        request = self.request = run_request(RUN_ID, profile="hermes", env={**SIZES, "total_steps": 10})
        self.state = RunState.create(self.paths, first_record(home, request), "made")
        self.state.move(RunStatus.STARTING, "made")
        self.state.move(RunStatus.RUNNING, "made")
        self.lock = locks.take(self.paths.supervisor_lock)
        assert self.lock is not None

    def step(self, number: int, **metrics: float) -> None:
        line: dict[str, Any] = {
            "step": number,
            "time": now(),
            "reward/mean": number / 10,
            "time/step_s": 2.0,
            **metrics,
        }
        append_line(self.paths.metrics, json.dumps(line))

    def operations(self) -> Operations:
        """A new server, as far as state in memory goes."""
        operator = load_settings({"HERMES_HOME": str(self.home.root)}, Flags(profile="hermes"))
        return Operations(operator, clock=lambda: self.time)

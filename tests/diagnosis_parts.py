"""Evidence as tests of a diagnosis need it: a record in any state, and lines of metrics as the trainer writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_parts import run_request

from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.watch.evidence import Evidence

RUN_ID = "0123abcd"
VALUES: dict[str, Any] = {
    "max_token_length": 16,
    "max_token_trainer_length": 64,
    "group_size": 4,
    "learning_rate": 1e-4,
    "max_batches_offpolicy": 1,
    "max_steps_without_signal": 10,
    "keep_checkpoints": 3,
}


def record(status: RunStatus = RunStatus.RUNNING, **changes: Any) -> RunRecord:
    request = run_request(RUN_ID, env={"total_steps": 100, "group_size": 4, "batch_size": 8, "max_token_length": 16})
    return first_record(Home(Path("/home")), request).model_copy(update={"status": status, **changes})


def healthy(step: int, **changes: Any) -> dict[str, Any]:
    """A step of which nothing bad can be said. Names are given with ``__`` for ``/``."""
    line = {
        "step": step,
        "train/loss": 0.01,
        "train/learning_rate": 1e-4,
        "train/grad_norm": 0.5,
        "train/adapter_max_abs": 1e-4 * step,
        "reward/mean": 0.4,
        "train/percent_correct": 0.4,
        "advantages/std": 0.4,
        "policy/version": step,
        "policy/lag": 0.5,
        "groups/zero_variance_fraction": 0.25,
        "rollouts/truncated_fraction": 0.1,
    }
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    assert named.keys() <= line.keys(), "a misspelt name would test nothing"
    return {**line, **named}


def seen(lines: list[dict[str, Any]] | None = None, **more: Any) -> Evidence:
    """Evidence of a running run, unless ``record`` says otherwise."""
    return Evidence(**{"record": record(), "lines": lines or [], "values": VALUES, **more})


def steps(count: int, first: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """So many equal steps in a row."""
    return [healthy(step, **changes) for step in range(first, first + count)]

"""A run with every file that one can have, as much in each as a test wants. Nobody carries it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_parts import run_request

from hermes_rl_mcp.contracts.records import METRIC_NAMES, CheckpointMarker, RolloutLine
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.files import now
from hermes_rl_mcp.paths import PROCESS_LOGS, Home, RunPaths
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState

PER_STEP = 2
"""Rollouts that are kept."""


def full_run(
    environ: dict[str, str],
    run_id: str,
    *,
    steps: int = 12,
    text: str = "some words",
    status: RunStatus = RunStatus.COMPLETED,
    error: str | None = None,
    **request: Any,
) -> RunPaths:
    """``text`` is what its model, its environment and its logs say."""
    home = Home.from_environ(environ)
    paths = home.run(run_id)
    paths.dir.mkdir(parents=True)
    made = run_request(run_id, **request)
    paths.request.write_text(made.model_dump_json())
    state = RunState.create(paths, first_record(home, made), text)
    for step in (RunStatus.STARTING, RunStatus.RUNNING, status):
        state.move(step, text, error=error if step is status else None)
    paths.metrics.write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(1, steps + 1)))
    rollouts = [rollout(step, group, text) for step in range(1, steps + 1) for group in range(PER_STEP)]
    paths.rollouts.write_text("".join(one.model_dump_json() + "\n" for one in rollouts))
    home.logs.mkdir(parents=True, exist_ok=True)
    for process in PROCESS_LOGS:
        lines = "".join(f"{process} line {number}: {text}\n" for number in range(1, 10 * steps + 1))
        home.log(process, run_id).write_text(lines)
    checkpoint(paths.checkpoints, steps)
    return paths


def metrics(step: int) -> dict[str, Any]:
    """All of a line, with figures as long as the trainer writes them."""
    values = {name: step / 7 + place / 3 for place, name in enumerate(METRIC_NAMES)}
    return {"step": step, "time": now(), **values, "reward/mean": step / 10}


def rollout(step: int, group: int, text: str) -> RolloutLine:
    return RolloutLine(
        step=step,
        group=group,
        policy_version=step - 1,
        prompt=f"question {step}: {text}",
        completion=f"answer {step}.{group}: {text}",
        reward=step / 7,
        advantage=1 / 3,
        tokens=9,
        finish_reason="stop",
    )


def checkpoint(folder: Path, step: int) -> None:
    adapter = folder / f"step_{step}" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    marker = CheckpointMarker(
        step=step,
        policy_version=step,
        base_model="builtin:tiny",
        base_sha256="0" * 64,
        lora_rank=4,
        files={"adapter/adapter_config.json": "0" * 64},
        created_at=now(),
    )
    (adapter.parent / "complete.json").write_text(marker.model_dump_json())

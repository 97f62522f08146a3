"""A home full of finished runs, as years of training leave it: long metrics, large logs, checkpoints.

Quick to make: files that are only read are hard links to one, and logs are sparse before their last lines.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.contracts.runs import RunRequest, RunStatus
from hermes_rl_mcp.paths import PROCESS_LOGS, Home
from hermes_rl_mcp.runs.runconfig import first_record

METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "reward/mean", "reward/std", "logprobs/mean")
LOG_END = b"".join(b"12:00:00 INFO step %d of 3000: reward 0.5\n" % step for step in range(200))
CHECKPOINTS = 3


def fill(home: Home, count: int, *, steps: int, log_bytes: int) -> list[str]:
    """``count`` completed runs of ``steps`` steps, each log of ``log_bytes``. Their ids, oldest first."""
    template = home.root / "template"
    template.mkdir(parents=True)
    home.logs.mkdir(parents=True)
    begun = datetime(2025, 1, 1, tzinfo=UTC)
    line = dict.fromkeys(METRICS, 0.1234567890123456)
    rows = [{"step": step, "time": begun.isoformat(), **line} for step in range(1, steps + 1)]
    metrics = _file(template / "metrics", "".join(json.dumps(row) + "\n" for row in rows))
    weights = _file(template / "weights", "w" * 4096)
    ids = [f"{number:08x}" for number in range(1, count + 1)]
    for number, run_id in enumerate(ids):
        paths = home.run(run_id)
        paths.dir.mkdir(parents=True)
        request = _request(home, run_id, (begun + timedelta(hours=number)).isoformat(), steps)
        record = first_record(home, request).model_copy(
            update={"status": RunStatus.COMPLETED, "ended_at": request.created_at, "running_seconds": 3600.0}
        )
        paths.request.write_text(request.model_dump_json(indent=1))
        paths.record.write_text(record.model_dump_json(indent=1))
        for path in (paths.metrics, paths.env_metrics, paths.rollouts):
            path.hardlink_to(metrics)
        _checkpoints(paths.checkpoints, weights, steps)
        for process in PROCESS_LOGS:
            with home.log(process, run_id).open("wb") as log:
                log.truncate(log_bytes)
                log.seek(log_bytes)
                log.write(b"\n" + LOG_END)
    return ids


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _checkpoints(folder: Path, weights: Path, steps: int) -> None:
    for number in range(CHECKPOINTS):
        step = steps - number
        adapter = folder / f"step_{step}" / "adapter"
        adapter.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (adapter / name).hardlink_to(weights)
        files = {f"adapter/{name}": "0" * 64 for name in ("adapter_config.json", "adapter_model.safetensors")}
        marker = CheckpointMarker(
            step=step,
            policy_version=step,
            base_model="builtin:tiny",
            base_sha256="0" * 64,
            lora_rank=16,
            files=files,
            created_at="2025-01-01T00:00:00+00:00",
        )
        (adapter.parent / "complete.json").write_text(marker.model_dump_json())


def _request(home: Home, run_id: str, created_at: str, steps: int) -> RunRequest:
    return RunRequest(
        run_id=run_id,
        created_at=created_at,
        environment="arithmetic",
        env_file="/environments/arithmetic.py",
        env_class="Arithmetic",
        env_sha256="0" * 64,
        profile="local",
        base_model="builtin:tiny",
        model_path=str(home.model_dir("builtin:tiny")),
        tokenizer_name=str(home.model_dir("builtin:tiny")),
        env={"total_steps": steps, "group_size": 8, "batch_size": 64, "max_token_length": 16},
        trainer=TrainerConfig(),
        idempotency_key=f"key-{run_id}",
    )

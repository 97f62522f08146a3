"""A run's directory as far as its weights go: a tiny base model, configuration, checkpoints and metrics, made on the
spot by the trainer's own writers."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tiny_llama import build_tiny_llama
from trainer_parts import load_model, settings

from hermes_rl_mcp.paths import Home
from trainer.backends.local.backend import LocalBackend
from trainer.checkpoints import Checkpoints, Counters

RUN_ID = "0badcafe"
STEPS = (2, 4)
EVIL = "x|`<script>\n# injected"
"""As an environment might call itself."""


def make_run(home: Home, base: Path, *, adapter_std: float = 0.05, environment: str = "arithmetic") -> Path:
    """Its directory. The checkpoints of both steps hold the same adapter."""
    if not (base / "config.json").exists():
        build_tiny_llama(base)
    run_dir = home.run(RUN_ID).dir
    run_dir.mkdir(parents=True)
    config = {
        "run": {
            "run_id": RUN_ID,
            "environment": environment,
            "env_file": "/secret/place/env.py",
            "env_class": "Env",
            "env_sha256": "ab" * 32,
            "profile": "local",
            "base_model": str(base),
            "model_path": str(base),
            "nonce": "n0nce-of-this-run",
            "path_prefix": "s3cret-prefix",
        },
        "ports": {"rollout_api": 8000, "trainer": 8001},
        "env": {"total_steps": 4, "group_size": 4, "batch_size": 8, "max_token_length": 16, "judge_key": "sk-hidden"},
        "openai": [],
        "trainer": settings().model_dump(),
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    backend = LocalBackend(load_model(base, adapter_std=adapter_std), settings())
    try:
        checkpoints = Checkpoints(run_dir / "checkpoints", backend, base_model=str(base), lora_rank=4)
        for step in STEPS:
            checkpoints.save(Counters(step=step, optimizer_steps=step, policy_version=step, steps_without_signal=0))
    finally:
        backend.close()
    lines = [{"step": step, "reward/mean": step / 10, "train/loss": None} for step in range(1, 6)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "rollouts.jsonl").write_text(json.dumps({"prompt": "2+3=", "completion": "5€", "step": 4}) + "\n")
    return run_dir

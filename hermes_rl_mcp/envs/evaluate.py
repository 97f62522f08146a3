"""Evaluation: runs the environment's hook and writes ``metrics.json`` and ``samples.jsonl`` as Atropos does."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hermes_rl_mcp.envs.base import BaseEnv, EvalReport
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig
from hermes_rl_mcp.envs.hook_rules import metrics_of
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.redact import redact, secret_values

log = logging.getLogger(__name__)


async def run_evaluation(env: BaseEnv, step: int | None = None) -> EvalReport:
    """What ``env.evaluate()`` found; also written to ``data_dir_to_save_evals`` (in a run, to ``step_N`` below it)."""
    started = time.monotonic()
    result = await env.evaluate()
    seconds = time.monotonic() - started
    report = result if isinstance(result, EvalReport) else EvalReport(metrics_of(type(env), result))
    folder = env.config.data_dir_to_save_evals
    if folder:
        target = Path(folder) if step is None else Path(folder) / f"step_{step}"
        _write(env, report, target, seconds)
    elif step is None:
        log.warning("data_dir_to_save_evals is not set: metrics.json and samples.jsonl are not written")
    log.info("evaluation took %.1f s: %s", seconds, json.dumps(report.metrics))
    return report


def write_config(config: BaseEnvConfig, servers: Sequence[APIServerConfig]) -> None:
    """``evaluate_config.yaml`` beside the results: what was asked with which values, keys masked."""
    folder = config.data_dir_to_save_evals
    if not folder:
        return
    said = {"env": config.model_dump(mode="json"), "openai": [one.model_dump(mode="json") for one in servers]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(redact(said, secret_values(os.environ)), sort_keys=False, allow_unicode=True)
    write_atomic(Path(folder) / "evaluate_config.yaml", text)


def _write(env: BaseEnv, report: EvalReport, folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the file the original drops the namespace that W&B charts need.
    metrics = {name.removeprefix("eval/"): value for name, value in report.metrics.items()}
    document: dict[str, Any] = {
        "config_general": {
            "model_name": env.server_configs[0].model_name if env.server_configs else "",
            "total_evaluation_time_seconds": str(round(seconds, 3)),
            "generation_parameters": report.generation_parameters,
        },
        "results": {f"atropos|{env.env_name()}|0": metrics, "all": metrics},
    }
    write_atomic(folder / "metrics.json", json.dumps(document, indent=2, ensure_ascii=False))
    lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in report.samples]
    write_atomic(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))


def table(metrics: Mapping[str, float]) -> str:
    """For people, one metric per line."""
    width = max((len(name) for name in metrics), default=0)
    return "\n".join(f"{name:<{width}}  {value:.4g}" for name, value in metrics.items()) or "no metrics"

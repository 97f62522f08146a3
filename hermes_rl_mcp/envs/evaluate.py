"""Evaluation: runs the environment's hook and writes ``metrics.json`` and ``samples.jsonl`` as Atropos does."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from hermes_rl_mcp.envs.base import BaseEnv, EvalReport
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig
from hermes_rl_mcp.envs.hook_rules import metrics_of, samples_of
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.redact import redact, secret_values

log = logging.getLogger(__name__)


async def run_evaluation(env: BaseEnv, step: int | None = None) -> EvalReport:
    """What ``env.evaluate()`` found; also written to ``data_dir_to_save_evals`` (in a run, to ``step_N`` below it)."""
    started = time.monotonic()
    env.logged_evaluation = None
    result = await env.evaluate()
    seconds = time.monotonic() - started
    if result is None:
        result = _logged(env)
    report = result if isinstance(result, EvalReport) else EvalReport(metrics_of(type(env), result))
    metrics, samples = metrics_of(type(env), report.metrics), samples_of(type(env), report.samples)
    report = replace(report, metrics=metrics, samples=samples)
    folder = env.config.data_dir_to_save_evals
    if folder:
        target = Path(folder) if step is None else Path(folder) / f"step_{step}"
        _write(env, report, target, seconds)
    elif step is None:
        log.warning("data_dir_to_save_evals is not set: metrics.json and samples.jsonl are not written")
    log.info("evaluation took %.1f s: %s", seconds, _text(report.metrics))
    return report


def _logged(env: BaseEnv) -> EvalReport | None:
    return env.logged_evaluation


def write_config(config: BaseEnvConfig, servers: Sequence[APIServerConfig]) -> None:
    """``evaluate_config.yaml`` beside the results: what was asked with which values, keys masked."""
    folder = config.data_dir_to_save_evals
    if not folder:
        return
    said = {"env": config.model_dump(mode="json"), "openai": [one.model_dump(mode="json") for one in servers]}
    text = yaml.safe_dump(redact(said, secret_values(os.environ)), sort_keys=False, allow_unicode=True)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomic(Path(folder) / "evaluate_config.yaml", text)
    except OSError as error:
        raise InvalidValueError(
            f"env.data_dir_to_save_evals: the folder {folder} cannot be written: {error.strerror}.",
            hint="Set it to a folder that can be made or written.",
        ) from error


def _write(env: BaseEnv, report: EvalReport, folder: Path, seconds: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the file the original drops the namespace that W&B charts need.
    metrics = {name.removeprefix("eval/"): value for name, value in report.metrics.items()}
    document: dict[str, Any] = {
        "config_general": {
            "model_name": report.model_name or (env.server_configs[0].model_name if env.server_configs else ""),
            "total_evaluation_time_seconds": str(round(seconds, 3)),
            "generation_parameters": report.generation_parameters,
        },
        "results": {f"atropos|{report.task_name or env.env_name()}|0": metrics, "all": metrics},
    }
    write_atomic(folder / "metrics.json", _text(document, indent=2))
    write_atomic(folder / "samples.jsonl", "".join(f"{_text(sample)}\n" for sample in report.samples))


def _text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: what is not finite is null, what is no JSON is its text."""
    plain = to_jsonable_python(value, fallback=str, inf_nan_mode="null")
    text = json.dumps(plain, indent=indent, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def table(metrics: Mapping[str, float]) -> str:
    """For people, one metric per line."""
    width = max((len(name) for name in metrics), default=0)
    return "\n".join(f"{name:<{width}}  {value:.4g}" for name, value in metrics.items()) or "no metrics"

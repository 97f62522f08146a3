"""Run directories with curves, for tests that draw."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from run_parts import run_request

from hermes_rl_mcp.contracts.records import ArmScore, Evaluation
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs.runconfig import first_record


def drawn_run(home: Home, run_id: str, lines: Iterable[dict[str, Any]], **changes: Any) -> RunPaths:
    """A run that ended, with these lines in its metrics."""
    paths = home.run(run_id)
    paths.dir.mkdir(parents=True)
    record = first_record(home, run_request(run_id, **changes))
    paths.record.write_text(record.model_copy(update={"status": RunStatus.COMPLETED}).model_dump_json())
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def learning(steps: int, seed: int = 0, gain: float = 0.4) -> list[dict[str, Any]]:
    """Lines of a run whose reward rises, with noise, and some batches without signal."""
    drawn = random.Random(seed)
    lines = []
    for step in range(1, steps + 1):
        reward = 0.3 + gain * (1 - math.exp(-3 * step / steps)) + drawn.gauss(0, 0.06)
        lines.append(
            {
                "step": step,
                "reward/mean": reward,
                "train/percent_correct": min(1.0, max(0.0, reward + 0.15)),
                "eval/percent_correct": None,
                "rollouts/length_mean": 40 + 60 * step / steps + drawn.gauss(0, 5),
                "train/loss": None if drawn.random() < 0.1 else drawn.gauss(0, 0.2) + 0.1,
            }
        )
    return lines


def evaluated(paths: RunPaths, steps: int, measure: str = "accuracy") -> None:
    """An evaluation at the end, and some during the run."""
    arms = [ArmScore(accuracy=a, low=a - 0.06, high=a + 0.06, policy_version=v) for a, v in ((0.41, 0), (0.72, steps))]
    paths.evaluation.write_text(
        Evaluation(
            status="completed",
            step=steps,
            items=200,
            measure=measure,
            base=arms[0],
            adapter=arms[1],
            verdict="improved by 0.31, 95% interval 0.24 to 0.38",
        ).model_dump_json()
    )
    points = [{"step": step, "eval/percent_correct": 0.4 + 0.3 * step / steps} for step in range(0, steps, steps // 4)]
    paths.env_metrics.write_text("".join(json.dumps(point) + "\n" for point in points))


def picture_size(picture: bytes) -> tuple[int, int]:
    """Of a PNG, in pixels."""
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(picture[16:20], "big"), int.from_bytes(picture[20:24], "big")


def folder_of(home: Home) -> list[Path]:
    """Pictures in the cache."""
    return sorted(home.plot_cache.glob("*.png"))

"""Choosing items by what is known of them leaves fewer groups without signal, with the real model and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest
from three_processes import run_directory

STEPS = 30
READY_S, RUN_S = 120.0, 500.0


def groups_without_signal(folder: Path, environ: Mapping[str, str], model: str) -> float:
    """Share over the last half of a run's steps."""
    folder.mkdir()
    env = {"total_steps": STEPS, "max_batches_offpolicy": 0, "seed": 0, "eval_items": 0}
    env |= {"mixed_up_to": 3, "exploration_model": model}
    with run_directory(folder, environ, env=env, trainer={"seed": 0}) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: run.health().get("status") == "ok", READY_S)
        run.start("env")
        run.wait(lambda: run.paths.report("trainer").exists(), RUN_S, alive="env")
        assert run.report().status == "completed", run.log("trainer")
        lines = run.metrics()
    assert len(lines) == STEPS
    return fmean(line["groups/zero_variance_fraction"] for line in lines[STEPS // 2 :])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_item_value_lowers_the_share_of_groups_without_signal(tmp_path: Path, environ: Mapping[str, str]) -> None:
    plain = groups_without_signal(tmp_path / "none", environ, "none")
    chosen = groups_without_signal(tmp_path / "item_value", environ, "item_value")
    assert chosen < 0.85 * plain

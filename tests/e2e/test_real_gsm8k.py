"""Real problems, a real instruction-tuned model: GSM8K on SmolLM2-135M for two steps, checked as a user would, and
against what was said of it before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from estimate_check import assert_within_a_factor_of_two, dry_run

from hermes_rl_mcp.cli.demo_settings import TABLE
from hermes_rl_mcp.paths import bundled_environments

TIMEOUT_S = 2700
"""A bound against hanging, not a measure: a busy machine takes several times as long as a quiet one."""
MODEL = "builtin:smollm2-135m"
SAMPLE = bundled_environments() / "gsm8k_sample"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(TIMEOUT_S + 150)
def test_two_steps_on_gsm8k_complete_with_an_adapter_that_stock_peft_loads(
    environ: dict[str, str],
    start_demo: Callable[..., Any],
    processes_left: Callable[..., list[str]],
    logit_change: Callable[[Path, Path, str], float],
    connect: Callable[..., Any],
) -> None:
    before = anyio.run(_said, connect, True)
    assert "measurement of this machine" in before["basis"], before
    options = ("--env", "gsm8k", "--model", MODEL, "--steps", "2", "--data-dir", str(SAMPLE))
    demo = start_demo(*options)
    code, summary = demo.finish(TIMEOUT_S)
    assert code == 0, demo.shown
    assert (summary["status"], summary["environment"], summary["steps"]) == ("completed", "gsm8k", 2)
    home = Path(environ["HERMES_HOME"])
    lines = (home / "rl" / "runs" / summary["run_id"] / "metrics.jsonl").read_text().splitlines()
    parts = [name for name in json.loads(lines[-1]) if name.startswith("reward/")]
    assert {"reward/correct", "reward/format"} <= set(parts), parts
    assert processes_left() == []
    base = home / "rl" / "models" / "smollm2-135m"
    assert logit_change(base, Path(summary["adapter_path"]), "Natalia sold clips to 48 of her friends.") > 0
    took = anyio.run(_took, connect, summary["run_id"])
    second = anyio.run(_said, connect, False)
    assert f"run {summary['run_id']}" in second["basis"]
    assert_within_a_factor_of_two(took, second)
    (home / "rl" / "runs" / summary["run_id"]).rename(home / "aside")  # as if it had never been
    shutil.rmtree(home / "rl" / "cache" / "speed")
    after = anyio.run(_said, connect, False)
    assert "measurement of this machine" in after["basis"], after
    assert_within_a_factor_of_two(took, before, after)


async def _said(connect: Callable[..., Any], select: bool) -> dict[str, Any]:
    """Of the settings that the demo takes."""
    async with connect() as call:
        if select:
            await call("rl_select_environment", name="gsm8k")
            edits = {**TABLE["gsm8k", MODEL], "model_name": MODEL, "total_steps": 2, "data_dir": str(SAMPLE)}
            for field, value in edits.items():
                await call("rl_edit_config", field=field, value=value)
        return await dry_run(call)


async def _took(connect: Callable[..., Any], run_id: str) -> dict[str, Any]:
    async with connect() as call:
        results = await call("rl_get_results", run_id=run_id)
    assert results["estimate"] is not None
    actual: dict[str, Any] = results["actual"]
    return actual

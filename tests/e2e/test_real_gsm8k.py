"""Real problems, a real instruction-tuned model: GSM8K on SmolLM2-135M for two steps, checked as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.paths import bundled_environments

TIMEOUT_S = 2700
"""A bound against hanging, not a measure: a busy machine takes several times as long as a quiet one."""
SAMPLE = bundled_environments() / "gsm8k_sample"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 150)
def test_two_steps_on_gsm8k_complete_with_an_adapter_that_stock_peft_loads(
    environ: dict[str, str],
    start_demo: Callable[..., Any],
    processes_left: Callable[..., list[str]],
    logit_change: Callable[[Path, Path, str], float],
) -> None:
    options = ("--env", "gsm8k", "--model", "builtin:smollm2-135m", "--steps", "2", "--data-dir", str(SAMPLE))
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

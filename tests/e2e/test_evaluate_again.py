"""``hermes-rl evaluate``: the evaluation of a run's end, once more and of any size, on a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_was_not_evaluated_can_be_evaluated_afterwards_as_often_as_one_likes(
    environ: dict[str, str], start_demo: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    demo = start_demo("--steps", "2", "--set", "eval_items=0")
    code, summary = demo.finish(500)
    assert code == 0, demo.shown
    assert (summary["evaluation"]["status"], summary["evaluation"]["reason"]) == ("skipped", "eval_items = 0")
    assert "skipped: eval_items = 0" in demo.shown

    def evaluate(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "evaluate", summary["run_id"], *args]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)

    first, again = evaluate("--items", "30", "--json"), evaluate("--items", "30", "--json")
    assert first.returncode == again.returncode == 0, first.stderr
    found = json.loads(first.stdout)
    assert (found["status"], found["items"], found["repeats"]) == ("completed", 10, 3)
    assert (found["base"]["policy_version"], found["adapter"]["policy_version"]) == (0, 2)
    assert "no detectable change" in found["verdict"] or "improved" in found["verdict"]
    assert "... loading the model" in first.stderr
    for side in ("base", "adapter"):
        assert json.loads(again.stdout)[side] == found[side], "the same seeds give the same answers"
    assert processes_left() == []
    missing = evaluate("--step", "77")
    assert missing.returncode == 1 and "no complete checkpoint of step 77" in missing.stderr
    assert "loading the model" not in missing.stderr, "what is not there is said before anything is started"

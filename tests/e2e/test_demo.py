"""The main job as a person runs it: ``hermes-rl demo`` on the embedded model, with every process and byte real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOOLS = (
    "rl_list_environments",
    "rl_select_environment",
    "rl_get_current_config",
    "rl_edit_config",
    "rl_start_training",
    "rl_check_status",
    "rl_get_results",
)
DEMO_TIMEOUT_S = 600
WAIT_S = 300
"""They only guard against hanging: the demo takes a minute on two idle cores."""


@pytest.mark.timeout(DEMO_TIMEOUT_S + 300)
def test_the_demo_trains_the_embedded_model_and_hands_back_an_adapter_that_changes_it(
    environ: dict[str, str],
    start_demo: Callable[..., Any],
    processes_left: Callable[..., list[str]],
    logit_change: Callable[[Path, Path, str], float],
) -> None:
    demo = start_demo()
    code, summary = demo.finish(DEMO_TIMEOUT_S)
    assert code == 0, demo.shown
    assert list(summary)[:9] == [
        *("run_id", "status", "environment", "model", "steps"),
        *("reward_first5", "reward_last5", "adapter_path", "seconds"),
    ]
    assert (summary["status"], summary["environment"], summary["model"]) == ("completed", "arithmetic", "builtin:tiny")
    assert summary["reward_last5"] - summary["reward_first5"] >= 0.2, summary
    verdict = summary["evaluation"]["verdict"]
    assert verdict.startswith("improved by ") and summary["evaluation"]["low"] > 0.1, summary
    assert verdict in " ".join(demo.shown.split())
    calls = [demo.shown.index(f"→ {tool}(") for tool in TOOLS]
    assert calls == sorted(calls)
    assert summary["adapter_path"] in demo.shown.replace("\n", "")
    assert "before" in demo.shown and "after" in demo.shown
    assert list(Path(environ["HERMES_HOME"]).glob("rl/*.json")) == []  # the demo's own selection is gone
    assert processes_left() == []
    _command_line_shows_the_run(environ, summary)
    base = Path(environ["HERMES_HOME"]) / "rl" / "models" / "tiny"
    assert logit_change(base, Path(summary["adapter_path"]), "3+5=") > 1e-3


def _command_line_shows_the_run(environ: dict[str, str], summary: dict[str, Any]) -> None:
    def hermes_rl(*args: str) -> str:
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", *args]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run_id = summary["run_id"]
    [row] = json.loads(hermes_rl("runs", "list", "--json"))["runs"]
    assert (row["run_id"], row["status"], row["step"]) == (run_id, "completed", summary["steps"])
    shown = hermes_rl("runs", "show", run_id)
    texts = (run_id, "completed", "reward/mean (dots: each step", summary["adapter_path"], "train/grad_norm")
    for text in (*texts, summary["evaluation"]["verdict"]):
        assert text in shown
    assert hermes_rl("runs", "stop", run_id) == f"Run {run_id} is completed.\n"
    assert len(hermes_rl("runs", "logs", run_id, "--process", "trainer", "--tail", "3").splitlines()) == 3


def test_ctrl_c_before_a_run_was_started_leaves_nothing(
    environ: dict[str, str], start_demo: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    demo = start_demo()
    demo.wait_for("→ rl_select_environment", WAIT_S)
    demo.process.send_signal(signal.SIGINT)
    code, summary = demo.finish()
    assert (code, summary["run_id"], summary["status"]) == (130, None, "not started")
    assert "Interrupted before a run was started" in demo.shown
    assert processes_left() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_stops_the_run_says_so_and_leaves_nothing_running(
    environ: dict[str, str], start_demo: Callable[..., Any], processes_left: Callable[..., list[str]]
) -> None:
    demo = start_demo("--steps", "5000")
    demo.wait_for("running: step", WAIT_S)
    demo.process.send_signal(signal.SIGINT)
    code, summary = demo.finish(WAIT_S)
    assert code == 130, demo.shown
    assert summary["status"] == "stopped"
    assert f"Run {summary['run_id']} is stopped; nothing of it is left running." in demo.shown
    record = json.loads((Path(environ["HERMES_HOME"]) / "rl" / "runs" / summary["run_id"] / "run.json").read_text())
    assert record["status"] == "stopped"
    assert processes_left() == []


def test_an_unknown_environment_is_an_error_that_names_the_known_ones_and_starts_nothing(
    environ: dict[str, str], start_demo: Callable[..., Any]
) -> None:
    demo = start_demo("--env", "no-such-thing")
    code, summary = demo.finish()
    assert code == 1
    assert summary["run_id"] is None
    assert "no-such-thing" in summary["error"]
    assert "arithmetic" in summary["hint"]
    assert "Error:" in demo.shown and "What to do:" in demo.shown
    assert not (Path(environ["HERMES_HOME"]) / "rl" / "runs").exists()


def test_a_setting_that_the_agent_may_not_make_is_refused_before_anything_starts(
    environ: dict[str, str], start_demo: Callable[..., Any]
) -> None:
    demo = start_demo("--set", "base_url=http://127.0.0.1:1/v1")
    code, summary = demo.finish()
    assert code == 1
    assert "locked" in summary["error"]
    assert not (Path(environ["HERMES_HOME"]) / "rl" / "runs").exists()

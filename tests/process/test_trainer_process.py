"""The trainer as a process: real rollout API, real environment, real signals, and an exit code that tells the truth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from leash import leash, leashed
from peft import PeftModel
from three_processes import NONCE, PREFIX, Run, run_directory
from tiny_llama import build_tiny_llama
from transformers import AutoModelForCausalLM

from hermes_rl_mcp.checkpoints import last_complete, read_marker
from hermes_rl_mcp.contracts.records import METRIC_NAMES, RolloutLine, TrainerSummary
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from hermes_rl_mcp.paths import install_root

READY_S = 250.0
EXIT_S = 250.0


def _ready(run: Run) -> bool:
    return run.health().get("status") == "ok"


def _post_group(run: Run, mark: int, *, logprob: float = -5.0) -> None:
    completions = [[50 + mark, 60, 61 + at] for at in range(2)]
    group: dict[str, Any] = {
        "tokens": [[40, 41, *one] for one in completions],
        "masks": [[-100, -100, *one] for one in completions],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, logprob, -4.0, -4.0]] * 2,
    }
    url = f"http://127.0.0.1:{run.ports['api']}/{PREFIX}/scored_data"
    assert httpx.post(url, json=group, trust_env=False, timeout=60).status_code == 200


@pytest.mark.timeout(900)
def test_a_run_trains_the_tiny_model_and_completes_with_an_adapter_that_works(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    with run_directory(tmp_path, environ, env={"total_steps": 6}, trainer={"save_checkpoint_interval": 4}) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: bool(run.health()), READY_S)
        run.wait(lambda: _ready(run), READY_S)
        health = SamplingHealth.model_validate(run.health())
        assert (health.nonce, health.model, health.policy_version) == (NONCE, "builtin:tiny", 0)
        run.start("env")
        assert run.processes["trainer"].wait(EXIT_S) == 0, run.log("trainer")
        assert run.end("env") == 0
        assert run.end("api") == 0

        lines = run.metrics()
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert all(
            {name for name in line if not name.startswith("reward/")} <= {"step", "time", *METRIC_NAMES}
            for line in lines
        )
        assert all(set(METRIC_NAMES) <= set(line) for line in lines)
        assert all(abs(line["logprobs/diff"]) < 1e-4 for line in lines if line["policy/lag"] == 0)
        assert any(line["policy/lag"] == 0 for line in lines)
        rollouts = [RolloutLine.model_validate_json(line) for line in run.paths.rollouts.read_text().splitlines()]
        assert {line.step for line in rollouts} == {1, 2, 3, 4, 5, 6}
        report = run.report()
        assert (report.status, report.step) == ("completed", 6)
        summary = TrainerSummary.model_validate(report.detail)
        assert summary.preview is not None and summary.preview.before and summary.preview.after
        assert (summary.steps, summary.policy_version) == (6, 6)
        _assert_adapter_works(Path(summary.model_path), Path(summary.adapter_path))
        assert NONCE not in run.log("trainer") and PREFIX not in run.log("trainer")
        _assert_serves(tmp_path, environ, summary)


def _assert_adapter_works(base: Path, adapter: Path) -> None:
    assert adapter.is_absolute()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.tensor([[50, 43, 51, 61]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        trained = PeftModel.from_pretrained(model, adapter)(input_ids=ids).logits
    assert float((trained - plain).abs().max()) > 1e-2


def _assert_serves(tmp_path: Path, environ: dict[str, str], summary: TrainerSummary) -> None:
    """``trainer.serve`` answers the preview's prompt as the run did."""
    log = (tmp_path / "serve.log").open("wb")
    arguments = [
        "--model",
        summary.model_path,
        "--adapter",
        summary.adapter_path,
        "--port",
        "0",
        "--nonce",
        "n",
        "--torch-threads",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.serve", *arguments],
        env=leashed({**environ, "PYTHONPATH": str(install_root())}),
        pass_fds=(leash(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
    )
    try:
        text = (tmp_path / "serve.log").read_text
        run = Run(None, {}, {}, {}, {"serve": process})  # type: ignore[arg-type]
        run.log = lambda name: text()  # type: ignore[method-assign]
        run.wait(lambda: "serving" in text() and "on port" in text(), READY_S, alive="serve")
        port = text().rsplit("on port ", 1)[1].split()[0]
        url = f"http://127.0.0.1:{port}"
        health = httpx.get(f"{url}/health", trust_env=False, timeout=60).json()
        assert (health["status"], health["nonce"], health["policy_version"]) == ("ok", "n", 6)
        assert summary.preview is not None
        chat = {"messages": [{"role": "user", "content": summary.preview.prompt}], "temperature": 0, "max_tokens": 12}
        reply = httpx.post(f"{url}/v1/chat/completions", json=chat, trust_env=False, timeout=100).json()
        assert reply["choices"][0]["message"]["content"] == summary.preview.after
        process.terminate()
        assert process.wait(100) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(100)
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_leaves_a_complete_checkpoint_from_which_the_run_goes_on_until_it_fails_honestly(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    base = str(build_tiny_llama(tmp_path / "base"))
    sizes = {"group_size": 2, "batch_size": 2, "total_steps": 9}
    with run_directory(tmp_path, environ, model=base, model_path=base, env=sizes) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: _ready(run), READY_S)
        for mark in range(3):
            _post_group(run, mark)
        run.wait(lambda: len(run.metrics()) == 3, READY_S)
        assert run.end("trainer") == 143, run.log("trainer")
        good = last_complete(run.paths.checkpoints)
        assert good is not None and good.name == "step_3"
        marker = read_marker(good)
        assert marker is not None and marker.policy_version == 3
        assert not run.paths.report("trainer").exists()

        assert run.start("trainer").wait(EXIT_S) == 1
        assert "already holds a run" in str(run.report().error)

        run.start("trainer", "--resume")
        run.wait(lambda: _ready(run), READY_S)
        assert run.health()["policy_version"] == 3
        _post_group(run, 3)
        run.wait(lambda: len(run.metrics()) == 4, READY_S)
        _post_group(run, 4, logprob=-1e4)
        assert run.processes["trainer"].wait(EXIT_S) == 1
        report = run.report()
        assert (report.status, report.step) == ("failed", 4)
        assert "Step 5: loss or gradient is not finite" in str(report.error)
        assert "step_4" in str(report.error) and report.hint
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        run.end("api")


@pytest.mark.timeout(900)
def test_a_trainer_that_cannot_start_says_why_and_one_that_loads_can_be_stopped(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    base = build_tiny_llama(tmp_path / "base")
    with run_directory(tmp_path, environ, model=str(base), model_path=str(base)) as run:
        run.start("trainer")
        run.wait(lambda: bool(run.health()), READY_S)
        assert run.health()["status"] == "starting"
        assert run.end("trainer") == 143
        assert not run.paths.checkpoints.exists()

        (base / "model.safetensors").unlink()
        assert run.start("trainer").wait(EXIT_S) == 1
        report = run.report()
        assert report.status == "failed" and "safetensors" in str(report.error) and report.hint

        run.paths.config.write_text(json.dumps({"run": {}}))
        assert run.start("trainer").wait(EXIT_S) == 1
        assert "no run configuration" in str(run.report().error)

"""The real trainer after its last step: it stays up for the evaluation, answers as base and as adapter, and can go."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from three_processes import PREFIX, Run, run_directory
from tiny_llama import build_tiny_llama

from hermes_rl_mcp.contracts.sampling_api import EVALUATING

READY_S = 250.0


def post_group(run: Run) -> None:
    group: dict[str, Any] = {
        "tokens": [[40, 41, 50 + at, 60, 61] for at in range(2)],
        "masks": [[-100, -100, 50 + at, 60, 61] for at in range(2)],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -5.0, -4.0, -4.0]] * 2,
    }
    url = f"http://127.0.0.1:{run.ports['api']}/{PREFIX}/scored_data"
    assert httpx.post(url, json=group, trust_env=False, timeout=60).status_code == 200


def ask(run: Run, **more: Any) -> dict[str, Any]:
    body = {"prompt": {"prompt_token_ids": [40, 41]}, "max_tokens": 4, "seed": 1, "evaluation": True, **more}
    reply = httpx.post(f"{run.trainer_url}/generate", json=body, trust_env=False, timeout=200)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.timeout(900)
def test_it_stays_up_for_base_and_adapter_and_leaves_at_once_when_asked_to(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    base = str(build_tiny_llama(tmp_path / "base"))
    env = {"group_size": 2, "batch_size": 2, "total_steps": 1, "eval_items": 40}
    # A rate so large that one step changes every likely token.
    with run_directory(tmp_path, environ, model=base, model_path=base, env=env, trainer={"learning_rate": 0.1}) as run:
        run.start("api")
        run.start("trainer")
        run.wait(lambda: run.health().get("status") == "ok", READY_S)
        before = ask(run)
        post_group(run)
        run.wait(lambda: run.health().get("phase") == EVALUATING, READY_S)
        report = run.report()
        assert (report.status, report.stays_s) == ("completed", 600.0)
        assert Path(str(report.detail["adapter_path"])).is_dir()

        as_base, as_adapter = ask(run, adapter=False), ask(run)
        assert (as_base["policy_version"], as_adapter["policy_version"]) == (0, 1)
        assert as_base["logprobs"] == before["logprobs"]
        assert as_adapter["logprobs"] != before["logprobs"]

        run.processes["trainer"].send_signal(signal.SIGTERM)
        assert run.processes["trainer"].wait(200) == 0, run.log("trainer")  # it must not wait for the deadline
        assert run.report() == report

"""A teacher's words on their whole way: from a judge over hints and the sampler to the trainer's loss, in a real run.

The model is too small for tools, so it answers in one turn; what it is to learn is what its own base says after a hint.
Nothing is rewarded, so nothing but the teacher moves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
from env_rig import Sampler, json_lines, say, serving

STEPS = 12
RUN_S = 900
"""A bound against hanging."""
TASKS = ["2+3=", "4+2=", "held out"]
HINT = "[HINT_START]The answer is to be given in words: It is 9[HINT_END] \\boxed{1}"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(RUN_S + 100)
async def test_a_run_draws_the_policy_towards_what_its_base_says_after_a_hint(
    tmp_path: Path, environ: dict[str, str], connect: Callable[..., Any]
) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps({"task": one, "test_code": "assert answer"}) + "\n" for one in TASKS))
    with serving(Sampler(say(HINT))) as judge:
        edits = {
            "judge_base_url": f"{judge.url}/v1",
            **{"model_name": "builtin:tiny", "total_steps": STEPS, "group_size": 8, "batch_size": 16},
            **{"max_token_length": 12, "max_batches_offpolicy": 0, "eval_items": 0, "steps_per_eval": -1},
            **{"learning_rate": 5e-3, "lora_rank": 16, "enabled_toolsets": [], "system_prompt": None},
            **{"dataset_name": str(data), "teacher": "base", "judge": "model", "prm_votes": 1},
        }
        async with connect() as call:
            await call("rl_select_environment", name="agentic_opd_env")
            for field, value in edits.items():
                await call("rl_edit_config", field=field, value=value)
            run_id = (await call("rl_start_training"))["run_id"]
            with anyio.fail_after(RUN_S):
                status: dict[str, Any] = {"status": "queued"}
                while status["status"] in ("queued", "starting", "running"):
                    status = await call("rl_check_status", run_id=run_id, wait_seconds=10)
        assert status["status"] == "completed", status
        assert len(judge.requests) >= STEPS * 16
    run = Path(environ["HERMES_HOME"]) / "rl" / "runs" / run_id
    lines = json_lines(run / "metrics.jsonl")
    distances = [line["train/distill_kl"] for line in lines]
    assert len(distances) == STEPS
    assert all(math.isfinite(one) and one > 0 for one in distances)
    assert all(line["reward/std"] == 0 and line["tokens/trained"] > 0 for line in lines)
    assert fmean(distances[-3:]) < 0.6 * fmean(distances[:2]), distances
    told = [line for line in json_lines(run / "env_metrics.jsonl") if "opd/hint_rate" in line]
    assert told and all(line["opd/hint_rate"] == 1.0 and line["opd/mean_turns_scored"] == 1.0 for line in told)

"""Agents are trained: real supervisor, trainer and sampler, calls out of sampled tokens, real sandboxes and rewards.

The policy begins with two calls in equal shares (``call_model``), of which one is right. What it proves: every part
from the sampled token to the accepted gradient fits. That a model of this size learns to use tools it does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import call_model
import pytest

from environments.hermes_swe_env import PROMPT
from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.files import read_tail
from hermes_rl_mcp.operations.operations import Operations

STEPS = 4
END_S = 1200
EDITS: dict[str, Any] = {
    "device": "cpu",
    "torch_threads": 1,
    "lora_rank": 8,
    "learning_rate": 1e-3,
    "group_size": 8,
    "batch_size": 16,
    "total_steps": STEPS,
    "max_token_length": 70,
    "max_token_trainer_length": 500,
    "max_batches_offpolicy": 0,
    "eval_items": 0,
    "steps_per_eval": -1,
    "save_checkpoint_interval": 0,
    "max_agent_turns": 1,
    "tool_call_parser": call_model.PARSER,
    "system_prompt": None,
}
TASKS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "terminal-test": ({"prompt": "w", "path": "a", "expected": "7"}, "{task}", ["echo 7 > a", "echo 1 > a"]),
    "hermes-swe": (
        {"prompt": "f", "test": "assert f(-2) == 2"},
        PROMPT,
        ["echo f=abs > solution.py", "echo f=int > solution.py"],
    ),
}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(END_S + 300)
@pytest.mark.parametrize("name", TASKS)
async def test_a_policy_that_calls_tools_is_trained_on_what_its_calls_were_worth(
    name: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    row, form, commands = TASKS[name]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 4)
    model = tmp_path / "model"
    assert await anyio.to_thread.run_sync(call_model.make, model, form.format(task=row["prompt"]), commands) < 0.04
    ops = Operations.from_environ({**environ, "HERMES_RL_ALLOW_MODELS": str(model)})
    await ops.select_environment(name)
    sessions = ops.context.sessions
    edits = {**EDITS, "model_name": str(model), "dataset_name": str(rows)}
    sessions.select(sessions.read().model_copy(update={"edits": edits}))
    run_id = (await ops.start_training()).run_id
    store, home = ops.context.runs, ops.context.home
    with anyio.fail_after(END_S):
        while not (record := store.get(run_id)).status.terminal:  # noqa: ASYNC110 - another process's file
            await anyio.sleep(0.2)
    logs = "\n".join(read_tail(home.log(process, run_id), 3000) for process in ("supervisor", "trainer", "env"))
    assert record.status is RunStatus.COMPLETED, (record.error, logs)
    lines = store.metrics(run_id).lines
    assert len(lines) == STEPS
    trained = [line for line in lines if line["train/loss"] is not None]
    assert trained and lines[-1]["policy/version"] == len(trained)
    assert all(line["train/grad_norm"] > 0 for line in trained)
    assert lines[0]["reward/called" if name == "terminal-test" else "reward/wrote_program"] > 0.5
    assert 0 < lines[0]["reward/correct"] < 1
    said = (store.paths(run_id).dir / "env_metrics.jsonl").read_text()
    assert '"train/avg_reward"' in said and '"train/tool_calls"' in said

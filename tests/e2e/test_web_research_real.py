"""web-research trained for a few real steps: server, supervisor, three processes, the agent loop and its reward.

The policy is builtin:tiny, which knows short sums and nothing else, so those are the questions, and a corpus holds the
answers. Its context of 512 bytes has no room for the tools' schemas: its chat template here leaves them out, and it
never calls one (a scripted policy does, in the contract tests). What varies within a group, and what is trained on, is
whether a sum is right. So this proves the way from questions over the loop, the reward and the masks to accepted steps,
and not that anything is learned of research.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from hermes_rl_mcp.paths import install_root

STEPS = 4
TEMPLATE = """{%- for message in messages -%}
{{- '<|user|>' if message['role'] == 'tool' else '<|' + message['role'] + '|>' -}}
{{- message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def _model(folder: Path) -> Path:
    shutil.copytree(install_root() / "trainer" / "models" / "tiny", folder, copy_function=shutil.copyfile)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _data(folder: Path) -> dict[str, str]:
    """Every one-digit sum as a question and as a page."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"Prompt": f"{a}+{b}=", "Answer": str(a + b)} for a, b in sums]
    pages = [
        {"url": f"https://sums.example/{a}-{b}", "title": f"{a}+{b}", "text": f"{a}+{b} is {a + b}."} for a, b in sums
    ]
    found = {}
    for field, lines in (("dataset_name", rows), ("corpus", pages)):
        path = folder / f"{field}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        found[field] = str(path)
    return found


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_few_steps_are_trained_on_the_rewards_of_real_conversations(
    tmp_path: Path,
    environ: dict[str, str],
    connect: Callable[..., Any],
    processes_left: Callable[..., list[str]],
    logit_change: Callable[[Path, Path, str], float],
) -> None:
    model = await anyio.to_thread.run_sync(_model, tmp_path / "model")
    edits: dict[str, Any] = {
        **{"model_name": str(model), "total_steps": STEPS, "group_size": 8, "batch_size": 32, "learning_rate": 1e-3},
        **{"max_token_length": 12, "max_agent_turns": 3, "steps_per_eval": -1, "eval_items": 0, "system_prompt": ""},
        **_data(tmp_path),
    }
    async with connect(HERMES_RL_ALLOW_MODELS=str(model)) as call:
        selected = await call("rl_select_environment", name="web_research_env")
        assert selected["environment"] == "web-research"
        for field, value in edits.items():
            await call("rl_edit_config", field=field, value=value)
        run_id = (await call("rl_start_training"))["run_id"]
        with anyio.fail_after(1500):
            while True:
                status = await call("rl_check_status", run_id=run_id, wait_seconds=30)
                if status["status"] in ("completed", "failed", "stopped", "interrupted"):
                    break
        assert status["status"] == "completed", status
        results = await call("rl_get_results", run_id=run_id)
    run = Path(environ["HERMES_HOME"]) / "rl" / "runs" / run_id
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accepted = [line for line in lines if line["train/loss"] is not None]
    assert len(lines) == STEPS and accepted
    assert lines[-1]["policy/version"] == len(accepted)
    assert all(line["train/grad_norm"] > 0 for line in accepted)
    assert all(0 < line["reward/correctness"] < 1 for line in accepted)
    told = [json.loads(line) for line in (run / "env_metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(told) if "train/total_rollouts" in line)
    assert last["train/total_rollouts"] >= 32 and 0 <= last["train/mean_correctness"] <= 1
    assert logit_change(model, Path(results["adapter_path"]), "3+5=") > 0
    assert processes_left() == []

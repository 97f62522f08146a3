"""Runs on the embedded model that cannot learn, each for another reason: the tools say which, early, and with the words
of the process that knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from env_rig import write_env

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(600)]
TINY = {"model_name": "builtin:tiny", "group_size": 4, "batch_size": 8, "total_steps": 50}
JUDGE = """
    def score_answer(self, item, completion):
        import httpx
        request = httpx.Request("POST", "https://judge.example/v1/grade")
        httpx.Response(401, request=request, text="bad key").raise_for_status()
"""
NO_SCORE = """
    def score_answer(self, item, completion):
        return None
"""
HANGS = """
    def score_answer(self, item, completion):
        if item > 2:
            import time
            time.sleep(3600)
        return float(len(completion.text))
"""


async def _start(call: Callable[..., Any], environment: str, **fields: Any) -> str:
    await call("rl_select_environment", name=environment)
    for field, value in {**TINY, **fields}.items():
        await call("rl_edit_config", field=field, value=value)
    run_id: str = (await call("rl_start_training"))["run_id"]
    return run_id


async def _flagged(call: Callable[..., Any], run_id: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first answer that has this flag, and the flag."""
    with anyio.fail_after(300):
        while True:
            answer = await call("rl_check_status", run_id=run_id, wait_seconds=5)
            found = {flag["name"]: flag for flag in answer["flags"]}
            if name in found:
                return answer, found[name]
            assert answer["status"] in ("queued", "starting", "running"), answer


async def _end(call: Callable[..., Any], run_id: str) -> dict[str, Any]:
    with anyio.fail_after(300):
        while (answer := await call("rl_check_status", run_id=run_id, wait_seconds=5))["status"] in (
            "running",
            "stopping",
        ):
            pass
    found: dict[str, Any] = answer
    return found


async def test_answers_that_are_all_cut_off_are_told_by_the_third_step(connect: Callable[..., Any]) -> None:
    async with connect() as call:
        run_id = await _start(call, "arithmetic", max_token_length=1)
        answer, flag = await _flagged(call, run_id, "all_truncated")
        assert flag["since_step"] == 1
        assert flag["evidence"].startswith("steps 1 to ")
        assert flag["setting"] == "max_token_length"
        assert "max_token_length = 1" in flag["evidence"]
        metrics = [json.loads(line) for line in await _lines(answer)]
        assert [line["rollouts/truncated_fraction"] for line in metrics[:3]] == [1.0] * 3
        await call("rl_stop_training", run_id=run_id)
        await _end(call, run_id)
        assert "all_truncated" in [flag["name"] for flag in (await call("rl_get_results", run_id=run_id))["flags"]]


async def _lines(answer: dict[str, Any]) -> list[str]:
    logs = Path(answer["logs"]["trainer"])
    path = anyio.Path(logs.parents[2] / "rl" / "runs" / answer["run_id"] / "metrics.jsonl")
    return (await path.read_text()).splitlines()


@pytest.mark.parametrize(
    ("extra", "name", "words"),
    [(JUDGE, "groups_failing", "401"), (NO_SCORE, "rewards_missing", "score_answer gave None")],
    ids=["fi_26", "none"],
)
async def test_fi_26_an_environment_that_cannot_score_is_told_first_and_then_fails_the_run_with_its_words(
    connect: Callable[..., Any], environ: dict[str, str], tmp_path: Path, extra: str, name: str, words: str
) -> None:
    environ["HERMES_RL_ENV_DIRS"] = str(write_env(tmp_path, extra).parent)
    async with connect() as call:
        run_id = await _start(call, "counting")
        answer, flag = await _flagged(call, run_id, name)
        assert answer["status"] == "running"
        assert answer["metrics"]["step"] is None
        assert words in flag["evidence"]
        ended = await _end(call, run_id)
        assert ended["status"] == "failed"
        assert "groups in a row could not be used" in ended["error"]
        assert words in ended["error"]
        assert [flag["name"] for flag in (await call("rl_get_results", run_id=run_id))["flags"]] == [name]


async def test_fi_24_an_environment_that_hangs_in_its_own_code_is_told_with_who_waits_for_what(
    connect: Callable[..., Any], environ: dict[str, str], tmp_path: Path
) -> None:
    environ["HERMES_RL_ENV_DIRS"] = str(write_env(tmp_path, HANGS).parent)
    commands = tmp_path / "commands.json"
    commands.write_text(json.dumps({"limits": {"stall_s": 15, "vitals_s": 0.5, "env_term_s": 2}}))
    environ["HERMES_RL_CHILD_COMMANDS"] = str(commands)
    async with connect() as call:
        run_id = await _start(call, "counting")
        answer, flag = await _flagged(call, run_id, "stalled")
        assert answer["stalled"]
        assert "the trainer waits for a batch" in flag["evidence"]
        assert "the environment has sent nothing for" in flag["evidence"]
        assert "the trainer waits for a batch" in answer["waiting"]
        await call("rl_stop_training", run_id=run_id)
        assert (await _end(call, run_id))["status"] == "stopped"

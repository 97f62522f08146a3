"""rl_test_inference of an environment whose policy calls tools: over an endpoint with native calls, and served here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from env_rig import http_server
from fastapi import FastAPI, Request
from mcp_rig import Tools, in_memory

from hermes_rl_mcp.cli.envs_new import Wanted, write

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def environment(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """With the environment ``saved_sums`` of the template."""
    write(environ, Wanted("saved_sums", None, None, None, "tools", str(tmp_path / "envs")))
    return {**environ, "HERMES_RL_ENV_DIRS": str(tmp_path / "envs")}


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Calls ``save`` with the sum, every second time with another number, every third conversation not at all."""
    app, begun = FastAPI(), iter(range(1000))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        body = await request.json()
        last = body["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": "It is saved."}
        if last["role"] == "user":
            number = next(begun)
            left, right = re.findall(r"\d+", last["content"])
            arguments = json.dumps({"number": int(left) + int(right) + number % 2})
            call = {"id": f"c{number}", "type": "function", "function": {"name": "save", "arguments": arguments}}
            assert body["tools"][0]["function"]["name"] == "save"
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            if number % 3 == 2:
                message = {"role": "assistant", "content": f"I think it is {left}."}
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        return {"choices": [{"finish_reason": "stop", "message": message}], "usage": usage}

    with http_server(app) as url:
        yield url


async def verdict_of(call: Tools, **arguments: Any) -> dict[str, Any]:
    await call("rl_select_environment", name="saved_sums")
    result: dict[str, Any] = await call("rl_test_inference", wait_seconds=20, **arguments)
    with anyio.fail_after(500):
        while result["status"] == "running":
            result = await call("rl_test_inference", test_id=result["test_id"], wait_seconds=20)
    return result


@pytest.mark.slow
async def test_an_endpoint_with_native_tool_calls_is_judged_by_whole_conversations(
    environment: dict[str, str], endpoint: str
) -> None:
    told = {"HERMES_RL_INFERENCE_BASE_URL": f"{endpoint}/v1", "HERMES_RL_INFERENCE_MODEL": "vendor/caller"}
    async with in_memory({**environment, **told}) as call:
        result = await verdict_of(call, num_steps=2, group_size=6)
    assert result["status"] == "completed", result
    [model] = result["models_tested"]
    assert (model["error"], model["total_completions"], model["zero_variance_groups"]) == (None, 12, 0)
    assert model["reward_parts"] == {"correct": round(4 / 12, 4), "saved": round(8 / 12, 4)}
    assert (model["prompt_tokens"], model["parse_failures"]) == (200, 0), "20 turns; calls come taken apart"
    assert result["verdict"]["ready"] is True and "builtin:tiny, was not tested" in result["verdict"]["reasons"][-1]
    best = next(one for one in model["examples"] if one["kind"] == "best")
    assert best["prompt"].endswith("Save the number.") and "[TOOL CALL] save(" in best["completion"]


@pytest.mark.slow
async def test_the_local_model_that_calls_no_tool_is_not_ready(environment: dict[str, str]) -> None:
    async with in_memory({**environment, "HERMES_RL_INFERENCE_BASE_URL": "local"}) as call:
        result = await verdict_of(call, num_steps=2, group_size=4, models=["builtin:tiny"])
    assert result["status"] == "completed", result
    assert result["verdict"]["ready"] is False and "none is right" in result["verdict"]["reasons"][0]
    assert result["models_tested"][0]["parse_failures"] == 0

"""rl_test_inference runs the environment's own ``process`` for real; its answer never comes from an earlier test."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import anyio
import psutil
import pytest
from mcp_rig import Tools, environment_file, in_memory

from hermes_rl_mcp.operations.inference_records import TestPaths

KEY = "a-key-that-nobody-should-see"
pytestmark = pytest.mark.timeout(600)  # a crowded machine may take minutes to start and load what takes seconds


class Endpoint(ThreadingHTTPServer):
    """An OpenAI-compatible service: it adds the two digits it is asked for, always, or hangs."""

    daemon_threads = True

    def __init__(self, *, hang: bool = False, openrouter: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.released = threading.Event()
        if not hang:
            self.released.set()
        self.openrouter = openrouter
        """It says who answered, what it cost, and ignores n, as OpenRouter does."""
        self.asked = threading.Event()
        self.keys: set[str | None] = set()
        self.models: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def environ(self) -> dict[str, str]:
        return {
            "HERMES_RL_INFERENCE_BASE_URL": f"http://127.0.0.1:{self.server_address[1]}/v1",
            "HERMES_RL_INFERENCE_MODEL": "vendor/small",
            "HERMES_RL_INFERENCE_API_KEY": KEY,
        }


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint  # type: ignore[assignment]
    protocol_version: ClassVar[str] = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers.get("Authorization"))
        self.server.models.add(asked["model"])
        self.server.asked.set()
        self.server.released.wait(500)
        left, right = asked["messages"][-1]["content"].rstrip("=").split("+")
        choice = {"message": {"role": "assistant", "content": str(int(left) + int(right))}, "finish_reason": "stop"}
        reply: dict[str, Any] = {"choices": [choice] * asked["n"]}
        if self.server.openrouter:
            usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22, "cost": 0.25}
            reply = {"id": "gen-1", "provider": "Some Cloud", "choices": [choice], "usage": usage}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hanging() -> Iterator[Endpoint]:
    server = Endpoint(hang=True)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def files_with(text: str, folder: str) -> list[Path]:
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    assert files
    return [file for file in files if text in file.read_text(errors="replace")]


async def finished(call: Tools, result: dict[str, Any]) -> dict[str, Any]:
    with anyio.fail_after(500):
        while result["status"] == "running":
            result = await call("rl_test_inference", test_id=result["test_id"], wait_seconds=10)
    return result


@pytest.mark.anyio
async def test_the_local_model_is_served_tested_and_ended_and_any_server_can_tell(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        await call("rl_select_environment", name="arithmetic")
        started = await call("rl_test_inference", num_steps=2, group_size=4, wait_seconds=0)
        assert started["status"] == "running"
        assert started["test_config"] == {
            "num_steps": 2,
            "group_size": 4,
            "rollouts_per_model": 8,
            "total_rollouts": 8,
        }
    async with in_memory(environ) as call:
        result = await finished(call, started)
    assert result["status"] == "completed", result
    [tested] = result["models_tested"]
    assert (tested["model"], tested["error"], tested["steps_tested"]) == ("builtin:tiny", None, 2)
    lines = read_lines(tested["output_file"])
    assert [step["completions"] for step in tested["steps"]] == [len(line["scores"]) for line in lines] == [4, 4]
    right = [note["reward_parts"]["correct"] > 0 for line in lines for note in line["overrides"]]
    assert tested["correct_completions"] == sum(right)
    assert tested["accuracy"] == round(sum(right) / 8, 3)
    assert set(tested["reward_parts"]) == {"correct", "format"}
    assert result["summary"]["environment_working"] is True
    assert result["summary"]["best_model"] == "builtin:tiny"


@pytest.mark.anyio
async def test_an_endpoint_is_used_with_its_key_which_appears_in_no_file_and_no_argument(
    environ: dict[str, str], endpoint: Endpoint
) -> None:
    async with in_memory({**environ, **endpoint.environ()}) as call:
        await call("rl_select_environment", name="arithmetic")
        one = await finished(call, await call("rl_test_inference", num_steps=1, group_size=2, wait_seconds=0))
        two = await finished(
            call, await call("rl_test_inference", num_steps=2, group_size=2, models=["a/b", "c"], wait_seconds=0)
        )
    assert one["status"] == "completed", one
    assert endpoint.keys == {f"Bearer {KEY}"}
    assert endpoint.models == {"vendor/small", "a/b", "c"}
    assert one["models_tested"][0]["accuracy"] == 1.0
    assert [(t["model"], t["scale"], t["steps_tested"]) for t in two["models_tested"]] == [
        ("a/b", "custom", 2),
        ("c", "custom", 2),
    ]
    assert two["summary"]["models_succeeded"] == 2
    assert one["summary"]["output_directory"] != two["summary"]["output_directory"]
    assert files_with(KEY, environ["HERMES_HOME"]) == []


@pytest.mark.anyio
async def test_an_environment_that_fails_is_not_said_to_work(
    environ: dict[str, str], endpoint: Endpoint, tmp_path: Path
) -> None:
    broken = """
        async def broken(self):
            raise RuntimeError("get_next_item is broken")

        Own.get_next_item = broken
    """
    environment_file(tmp_path / "envs", broken)
    async with in_memory({**environ, **endpoint.environ()}, env_dirs=[str(tmp_path / "envs")]) as call:
        await call("rl_select_environment", name="own")
        result = await finished(call, await call("rl_test_inference", num_steps=1, group_size=2, wait_seconds=0))
    assert result["status"] == "failed"
    [tested] = result["models_tested"]
    assert "exited with code 1" in tested["error"]
    assert "get_next_item" in f"{tested['error']} {tested['stderr']}"
    assert result["summary"]["environment_working"] is False
    assert result["summary"]["best_model"] is None


@pytest.mark.anyio
async def test_a_test_whose_process_is_killed_has_failed_and_leaves_nothing_running(
    environ: dict[str, str], hanging: Endpoint
) -> None:
    async with in_memory({**environ, **hanging.environ()}) as call:
        await call("rl_select_environment", name="arithmetic")
        started = await call("rl_test_inference", num_steps=1, group_size=2, wait_seconds=0)
        folder = Path(environ["HERMES_HOME"]) / "logs/rl_training/inference_tests" / started["test_id"]
        await anyio.to_thread.run_sync(hanging.asked.wait, 500)
        runner = json.loads((folder / "state.json").read_text())["runner"]["pid"]
        children = psutil.Process(runner).children(recursive=True)
        assert children
        for process in (psutil.Process(runner), *children):
            assert KEY not in " ".join(process.cmdline())
        os.kill(runner, signal.SIGKILL)
        result = await finished(call, started)
    assert result["status"] == "failed"
    assert "runner.log" in result["message"]
    assert psutil.wait_procs(children, timeout=100)[1] == []


@pytest.mark.anyio
async def test_what_cannot_be_tested_is_refused_at_once(environ: dict[str, str]) -> None:
    remote = {"HERMES_RL_INFERENCE_BASE_URL": "https://vendor.invalid/v1", "HERMES_RL_INFERENCE_MODEL": "m"}
    async with in_memory(environ) as call:
        await call("rl_select_environment", name="arithmetic")
        refused = await call.error("rl_test_inference", models=["stranger/model"])
        assert "allow-list" in refused["error"]
        assert "group_size" in (await call.error("rl_test_inference", group_size=0))["error"]
    async with in_memory({**environ, **remote}) as call:
        assert "OPENAI_API_KEY" in (await call.error("rl_test_inference"))["error"]
    assert not (Path(environ["HERMES_HOME"]) / "logs/rl_training/inference_tests").exists()


def test_files_of_models_with_dots_in_their_names_stay_apart(tmp_path: Path) -> None:
    names = ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.6B")
    paths = [TestPaths(tmp_path).of_model("e", name, "sampler.log") for name in names]
    assert len(set(paths)) == 3
    assert paths[0].name == "test_e_Qwen_Qwen2.5-0.5B.sampler.log"


@pytest.mark.anyio
async def test_openrouter_answers_for_its_three_models_and_says_what_it_cost(environ: dict[str, str]) -> None:
    broker = Endpoint(openrouter=True)
    address = f"http://127.0.0.1:{broker.server_address[1]}/v1"
    try:
        async with in_memory({**environ, "OPENROUTER_API_KEY": KEY, "OPENROUTER_BASE_URL": address}) as call:
            await call("rl_select_environment", name="arithmetic")
            result = await finished(call, await call("rl_test_inference", num_steps=2, group_size=2, wait_seconds=0))
    finally:
        broker.shutdown()
        broker.server_close()
    assert broker.keys == {f"Bearer {KEY}"}
    tests = result["models_tested"]
    assert {(one["model"], one["scale"]) for one in tests} == {
        ("qwen/qwen3-8b", "small"),
        ("z-ai/glm-4.7-flash", "medium"),
        ("minimax/minimax-m2.7", "large"),
    }
    for one in tests:
        assert (one["cost_usd"], one["prompt_tokens"], one["completion_tokens"]) == (1.0, 80, 8), (
            "four calls, n ignored"
        )
        assert one["provider"] == "127.0.0.1 (Some Cloud)"
        assert [example["kind"] for example in one["examples"]] == ["best", "worst", "random"]
        assert one["examples"][0]["prompt"].endswith("=")
        assert (one["reward_std"], one["zero_variance_groups"], one["truncation_ratio"]) == (0.0, 2, 0.0)
    assert result["verdict"]["ready"] is False
    assert "all are right" in result["verdict"]["reasons"][0]
    assert "builtin:tiny, was not tested" in result["verdict"]["reasons"][-1]
    assert files_with(KEY, environ["HERMES_HOME"]) == []


@pytest.mark.anyio
async def test_a_stopped_test_keeps_what_the_models_beside_the_slow_one_have_shown(
    environ: dict[str, str], hanging: Endpoint
) -> None:
    async with in_memory({**environ, **hanging.environ()}) as call:
        await call("rl_select_environment", name="arithmetic")
        models = ["slow/one", "builtin:tiny"]
        result = await call("rl_test_inference", num_steps=1, group_size=4, models=models, wait_seconds=0)
        with anyio.fail_after(500):
            while result["models_tested"][1]["steps_tested"] < 1:
                result = await call("rl_test_inference", test_id=result["test_id"], wait_seconds=0.2)
        assert result["status"] == "running"
        stopped = await call("rl_stop_training", run_id=result["test_id"])
        assert stopped["status"] == "stopping"
        result = await finished(call, result)
        assert (await call("rl_stop_training", run_id=result["test_id"]))["status"] == "stopped"
    assert result["status"] == "stopped"
    slow, tiny = result["models_tested"]
    assert "stopped" in slow["error"]
    assert tiny["total_completions"] == 4
    assert result["verdict"] == tiny["verdict"]


@pytest.mark.anyio
async def test_a_model_that_does_not_answer_is_given_up_at_the_deadline(
    environ: dict[str, str], hanging: Endpoint
) -> None:
    async with in_memory({**environ, **hanging.environ(), "HERMES_RL_INFERENCE_TIMEOUT_S": "0.5"}) as call:
        await call("rl_select_environment", name="arithmetic")
        result = await finished(call, await call("rl_test_inference", num_steps=1, group_size=2, wait_seconds=0))
    assert result["status"] == "failed"
    assert "timed out" in result["models_tested"][0]["error"]
    assert result["verdict"]["ready"] is False

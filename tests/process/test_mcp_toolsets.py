"""An MCP server's tools as an agent's: over stdio and HTTP, from many threads, after a death, gone with the toolset."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from env_rig import END_ID, TINY, Sampler, serving

from hermes_rl_mcp.agent import mcp_tools as under_test
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.mcp_tools import McpServer, McpToolset, mcp_servers, mcp_tools
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.toolbox import select_tools
from hermes_rl_mcp.envs import APIServerConfig
from hermes_rl_mcp.envs.hermes import HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.errors import EndpointError, InvalidValueError
from tests.tool_parts import Caller, wait_until

ECHO = str(Path(__file__).parents[1] / "mcp_echo.py")


class Calls:
    """Calls a toolset's tools by name, as a rollout does."""

    def __init__(self, toolset: McpToolset, folder: Path) -> None:
        self._tools = {tool.name: tool for tool in toolset.tools}
        self._caller = Caller(folder)

    def __call__(self, name: str, /, **args: Any) -> Any:
        return self._caller.call(self._tools[name], args)


def _server(**more: Any) -> McpServer:
    return McpServer(**{"name": "echo", "command": sys.executable, "args": [ECHO], "start_timeout_s": 120.0, **more})


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _http_server(port: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, ECHO, str(port)], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port), 120.0)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0


def test_a_servers_tools_are_called_like_ours_and_it_ends_with_the_toolset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERMES_RL_SECRET_X", "hidden-value-1")
    monkeypatch.setenv("HERMES_RL_RUN_ID", "run-1")
    with McpToolset(_server(prefix="e_")) as toolset:
        chosen = select_tools(["echo", "todo"], settings={}, extra=mcp_tools([toolset]))
        assert chosen.toolbox.names() == {"e_echo", "e_pid", "e_fail", "e_sleep", "todo"}
        with pytest.raises(InvalidValueError, match="both have a tool 'e_echo'"):
            mcp_tools([toolset, toolset])
        call = Calls(toolset, tmp_path)
        assert call("e_echo", text="a", times="3") == {"result": "aaa"}
        assert "it does not work" in call("e_fail")["error"]
        with pytest.raises(InvalidValueError, match="required"):
            call("e_echo")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda n: call("e_echo", text=f"{n},"), range(40)))
        assert found == [{"result": f"{n},"} for n in range(40)]
        process = psutil.Process(call("e_pid")["pid"])
        variables = process.environ()
        assert "HERMES_RL_SECRET_X" not in variables and variables["HERMES_RL_RUN_ID"] == "run-1"
    wait_until(lambda: not _is_alive(process))
    with pytest.raises(EndpointError, match="has ended"):
        call("e_echo", text="a")
    toolset.close()


def test_wrong_descriptions_of_servers_are_errors() -> None:
    assert [one.name for one in mcp_servers({"a": {"command": "x"}, "b": {"url": "http://y"}})] == ["a", "b"]
    several: list[dict[str, Any]] = [
        {"a": {}},
        {"a": {"command": "x", "url": "y"}},
        {"a b": {"command": "x"}},
        {"a": {"cmd": "x"}},
        {"a": 3},
    ]
    for wrong in several:
        with pytest.raises(InvalidValueError, match="MCP servers"):
            mcp_servers(wrong)


@pytest.mark.slow
def test_a_server_that_died_is_started_again_and_a_call_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with McpToolset(_server(call_timeout_s=60.0)) as toolset:
        call = Calls(toolset, tmp_path)
        first = call("pid")["pid"]
        psutil.Process(first).kill()
        assert "Connection closed" in call("echo", text="a")["error"]
        assert call("echo", text="b") == {"result": "b"}
        assert call("pid")["pid"] != first
        toolset.server.call_timeout_s = 1.0
        assert "within 1 s" in call("sleep", seconds=30)["error"]


@pytest.mark.slow
def test_a_server_over_http_is_reached_and_reached_again_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _free_port()
    with _http_server(port):
        toolset = McpToolset(_server(command=None, args=[], url=f"http://127.0.0.1:{port}/mcp"))
        call = Calls(toolset, tmp_path)
        assert call("echo", text="a", times=2) == {"result": "aa"}
        assert "it does not work" in call("fail")["error"]
    assert "error" in call("echo", text="b")
    with pytest.raises(EndpointError, match="cannot be used"):
        call("echo", text="c")
    with pytest.raises(EndpointError, match="tried again after 30 s"):
        call("echo", text="d")
    monkeypatch.setattr(under_test, "_RETRY_S", 0.0)
    with _http_server(port):
        assert call("echo", text="e") == {"result": "e"}
    toolset.close()


class Echoing(HermesAgentBaseEnv):
    """Whatever the conversation is, it is worth 1."""

    def format_prompt(self, item: str) -> str:
        return item

    def compute_reward(self, item: str, result: AgentResult, ctx: ToolContext) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_environment_has_the_tools_of_the_servers_that_its_configuration_names() -> None:
    call = b'<tool_call>{"name": "e_echo", "arguments": {"text": "heard", "times": 2}}</tool_call>'

    def policy(prompt: list[int], index: int) -> list[int]:
        has_result = b"<tool_response>" in bytes(one for one in prompt if one < 256)
        return [*(b"done" if has_result else call), END_ID]

    server = {"command": sys.executable, "args": [ECHO], "prefix": "e_", "start_timeout_s": 120}
    config = HermesAgentEnvConfig(tokenizer_name=str(TINY), enabled_toolsets=["todo"], mcp_servers={"echo": server})
    with serving(Sampler(policy)) as sampler:
        env = Echoing(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
        item, _ = await env.collect_trajectory("Say it.")
        processes = [one for one in psutil.Process().children(recursive=True) if ECHO in one.cmdline()]
        await env.cleanup()
        await env.server.close()
    assert item is not None and item["messages"] is not None
    assert [one["content"] for one in item["messages"][2:]] == ['{"result": "heardheard"}', "done"]
    assert len(processes) == 1
    await anyio.to_thread.run_sync(lambda: wait_until(lambda: not _is_alive(processes[0])))


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_training_tools_are_a_toolset_too(tmp_path: Path) -> None:
    server = McpServer(
        name="rl",
        command=sys.executable,
        args=["-P", "-m", "hermes_rl_mcp.server"],
        env={"HERMES_HOME": str(tmp_path / "home"), "HERMES_RL_CLAIMS_DIR": str(tmp_path / "claims")},
        start_timeout_s=120.0,
    )
    with McpToolset(server) as toolset:
        call = Calls(toolset, tmp_path)
        assert "arithmetic" in {one["name"] for one in call("rl_list_environments")["environments"]}
        assert call("rl_select_environment", name="arithmetic")["environment"] == "arithmetic"
        assert call("rl_edit_config", field="total_steps", value="8")["config"]["total_steps"] == 8
        assert "not found" in call("rl_check_status", run_id="nothing")["error"]
        whole = select_tools(["rl"], settings={}, extra=mcp_tools([toolset]))
        assert "rl_start_training" in whole.toolbox.names() and whole.dropped == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": "/no/such/program"}, "cannot be used"),
        ({"args": ["-c", "print('nonsense')"]}, "cannot be used"),
        ({"args": ["-c", "import time; time.sleep(600)"], "start_timeout_s": 1.0}, "within 1 s"),
        ({"command": None, "args": [], "url": "http://127.0.0.1:9/mcp"}, "cannot be used"),
    ],
    ids=["no-program", "no-server", "silent", "no-address"],
)
def test_a_server_that_cannot_be_used_is_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(EndpointError, match=says) as caught:
        McpToolset(_server(**more))
    assert "'echo'" in str(caught.value)


@pytest.mark.slow
def test_only_the_wanted_tools_are_there_and_a_wish_for_others_is_an_error() -> None:
    with McpToolset(_server(tools=["pid"])) as toolset:
        assert [tool.name for tool in toolset.tools] == ["pid"]
    with pytest.raises(InvalidValueError, match="no tool nothing"):
        McpToolset(_server(tools=["echo", "nothing"]))
    assert not [one for one in psutil.Process(os.getpid()).children(recursive=True) if ECHO in one.cmdline()]

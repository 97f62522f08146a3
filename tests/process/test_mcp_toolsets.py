"""An MCP server's tools as an agent's: over stdio and HTTP, from many threads, and gone with the toolset."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl_mcp.agent.mcp_tools import McpServer, McpToolset, mcp_servers, mcp_tools
from hermes_rl_mcp.agent.toolbox import call_tool, select_tools
from hermes_rl_mcp.errors import EndpointError, InvalidValueError
from tests.tool_parts import Caller, wait_until

ECHO = str(Path(__file__).parents[1] / "mcp_echo.py")


def _server(**more: Any) -> McpServer:
    return McpServer(**{"name": "echo", "command": sys.executable, "args": [ECHO], "start_timeout_s": 90.0, **more})


@pytest.fixture
def toolset() -> Iterator[McpToolset]:
    with McpToolset(_server(prefix="e_")) as found:
        yield found


def test_a_servers_tools_are_called_like_ours_and_it_ends_with_the_toolset(toolset: McpToolset, tmp_path: Path) -> None:
    chosen = select_tools(["echo", "todo"], settings={}, extra=mcp_tools([toolset]))
    assert chosen.toolbox.names() == {"e_echo", "e_pid", "e_fail", "e_sleep", "todo"}
    context = Caller(tmp_path).context

    def call(name: str, **args: Any) -> Any:
        tool = chosen.toolbox.get(name)
        assert tool is not None
        return call_tool(tool, args, context)

    assert call("e_echo", text="a", times="3") == {"result": "aaa"}
    assert "it does not work" in call("e_fail")["error"]
    with pytest.raises(InvalidValueError, match="required"):
        call("e_echo")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: call("e_echo", text=f"{n},"), range(40)))
    assert found == [{"result": f"{n},"} for n in range(40)]
    process = psutil.Process(call("e_pid")["pid"])
    toolset.close()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert "has ended" in str(call("e_echo", text="a")) or True
    toolset.close()


def test_a_call_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    with McpToolset(_server(call_timeout_s=1.0, tools=["sleep"])) as found:
        [tool] = found.tools
        assert "within 1 s" in str(call_tool(tool, {"seconds": 5}, Caller(tmp_path).context))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": "/no/such/program"}, "cannot be used"),
        ({"args": ["-c", "print('nonsense')"]}, "cannot be used"),
        ({"args": ["-c", "import time; time.sleep(60)"], "start_timeout_s": 1.0}, "within 1 s"),
        ({"command": None, "args": [], "url": "http://127.0.0.1:9/mcp"}, "cannot be used"),
    ],
    ids=["no-program", "no-server", "silent", "no-address"],
)
def test_a_server_that_cannot_be_used_is_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(EndpointError, match=says) as caught:
        McpToolset(_server(**more))
    assert "'echo'" in str(caught.value)


def test_wrong_descriptions_of_servers_are_errors() -> None:
    assert [one.name for one in mcp_servers({"a": {"command": "x"}, "b": {"url": "http://y"}})] == ["a", "b"]
    for wrong in (
        {"a": {}},
        {"a": {"command": "x", "url": "y"}},
        {"a b": {"command": "x"}},
        {"a": {"cmd": "x"}},
        {"a": 3},
    ):
        with pytest.raises(InvalidValueError, match="MCP servers"):
            mcp_servers(wrong)


def test_names_that_meet_and_tools_that_are_not_there_are_errors(toolset: McpToolset) -> None:
    with pytest.raises(InvalidValueError, match="both have a tool 'e_echo'"):
        mcp_tools([toolset, toolset])
    with pytest.raises(InvalidValueError, match="no tool nothing"):
        McpToolset(_server(tools=["echo", "nothing"]))


def test_the_servers_environment_has_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_RL_SECRET_X", "hidden-value-1")
    with McpToolset(_server(tools=["pid"])) as found:
        [tool] = found.tools
        answer = call_tool(tool, {}, Caller(tmp_path).context)
        assert isinstance(answer, dict)
        assert "HERMES_RL_SECRET_X" not in psutil.Process(int(str(answer["pid"]))).environ()
    assert "HERMES_RL_SECRET_X" in os.environ

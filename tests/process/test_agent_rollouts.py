"""Many agents at once in sandboxes of their own, some of which behave badly: none starves, nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.interfaces import ChatMessage, Tool
from hermes_rl_mcp.agent.loop import HermesAgentLoop
from hermes_rl_mcp.agent.pool import ToolPool
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.sandbox.local import Limits, LocalSandbox
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox
from hermes_rl_mcp.agent.toolbox import select_tools

ROLLOUTS, AT_ONCE = 1000, 64
LIMITS = Limits(processes=60, file_bytes=1_000_000)
LONG_S = 900.0
TOOLBOX = select_tools(["terminal", "file"], settings={}).toolbox

DAEMON = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(1000)"
BOMB = "import os,time\nfor _ in range(90):\n if os.fork() == 0:\n  os.setsid()\n  break\ntime.sleep(1000)"
"""Bounded in itself: ninety daemons."""

Call = tuple[str, dict[str, Any]]


def shell(command: str, **more: Any) -> Call:
    return "terminal", {"command": command, **more}


def written(path: str, content: str) -> Call:
    return "write_file", {"path": path, "content": content}


MEET = "touch {meet}/{number}; until test $(ls {meet} | wc -l) -ge {count}; do sleep 0.2; done; echo met"
SCRIPTS: dict[str, tuple[list[Call], str]] = {
    "works": ([written("a b", "1\n2\n"), shell("wc -l < 'a b'")], '"output": "2\\n"'),
    "daemon": (
        [written("d.py", DAEMON), shell(f"env -i setsid {sys.executable} d.py; (setsid sleep 1000 &); echo on")],
        '"output": "on\\n"',
    ),
    "background": ([shell("sleep 1000 & sleep 1000", background=True), ("process", {"action": "list"})], '"running"'),
    "bomb": ([written("b.py", BOMB), shell(f"{sys.executable} b.py"), shell("echo on")], '"output": "on\\n"'),
    "big file": ([shell("head -c 9000000 /dev/zero > f; stat -c %s f")], "1000000\\n"),
    "no folder": ([shell('rm -rf "$PWD"'), shell("echo on > f; cat f")], '"output": "on\\n"'),
    "no keeper": ([shell("setsid sleep 1000 & kill -9 $PPID; sleep 1000")], "the sandbox has ended"),
    "too long": ([shell("mkdir -p x/y; chmod 0 x; sleep 1000", timeout=1)], '"exit_code": 124'),
    "cancelled": ([shell("echo $$ > started; sleep 1000")], "never said"),
}


class Model:
    """Makes one call a turn, then stops."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = list(calls)

    async def chat_completion(self, *, messages: list[ChatMessage], **params: Any) -> Any:
        await asyncio.sleep(0)
        if not self._calls:
            return {"choices": [{"message": {"content": "done"}}]}
        name, arguments = self._calls.pop(0)
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"c{len(messages)}", "type": "function", "function": function}
        return {"choices": [{"message": {"content": "", "tool_calls": [call]}}]}


class Rollouts:
    """``meet``: the first ``AT_ONCE`` rollouts each have a command that ends when all of theirs run."""

    def __init__(self, root: Path, meet: Path) -> None:
        self.root, self.meet = root, meet
        self.pool = ToolPool()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def all(self, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._one(number))
        self.pool.close()

    async def _one(self, number: int) -> None:
        name = list(SCRIPTS)[number % len(SCRIPTS)]
        calls, said = SCRIPTS[name]
        if number < AT_ONCE:
            calls = [shell(MEET.format(meet=self.meet, number=number, count=AT_ONCE), timeout=600), *calls]
        async with self._places:
            sandbox = TaskSandbox(lambda: LocalSandbox(str(number), root=self.root, limits=LIMITS))
            ctx = ToolContext(str(number), sandbox, TOOLBOX)
            loop = HermesAgentLoop(Model(calls), toolbox=TOOLBOX, sandbox=sandbox, pool=self.pool)
            try:
                running = asyncio.create_task(loop.run([{"role": "user", "content": name}]))
                if name == "cancelled":
                    await self._cancel(running, sandbox)
                else:
                    self._check(await running, said, is_meeting=number < AT_ONCE)
            finally:
                await asyncio.shield(asyncio.create_task(asyncio.to_thread(ctx.cleanup)))

    async def _cancel(self, running: asyncio.Task[AgentResult], sandbox: TaskSandbox) -> None:
        """In the middle of its last command."""
        while not await asyncio.to_thread(lambda: "started" in sandbox().list_files(".")):
            assert not running.done()
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    def _check(self, result: AgentResult, said: str, *, is_meeting: bool) -> None:
        answers = [one["content"] for one in result.messages if one["role"] == "tool"]
        assert result.finished_naturally
        # With 64 bombs at once the keeper may still be ending one when the next command comes.
        still_ending = any("more than 60 processes" in one for one in answers[:-1])
        assert said in answers[-1] or (still_ending and "more than 60 processes" in answers[-1]), answers
        assert not is_meeting or "met" in answers[0], answers


def below(root: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(LONG_S)
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
async def test_a_thousand_rollouts_64_at_once_run_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    root, meet = tmp_path / "root", tmp_path / "meet"
    root.mkdir()
    meet.mkdir()
    await asyncio.to_thread(lambda: None)  # the loop's own threads and descriptors are there before
    await Rollouts(root, meet).all(0)
    children = len(psutil.Process().children())
    descriptors = psutil.Process().num_fds()
    await Rollouts(root, meet).all(ROLLOUTS)
    assert len(os.listdir(meet)) == AT_ONCE
    assert below(root) == []
    assert list(root.iterdir()) == []
    assert len(psutil.Process().children()) == children
    await until(lambda: not [one.name for one in threading.enumerate() if one.name.startswith("agent-tool")])
    assert psutil.Process().num_fds() <= descriptors


def test_the_fourteen_methods_of_a_reward_with_names_and_sizes_of_any_kind(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"url": "https://a.example/x", "title": "Herons", "text": "Herons wade."}) + "\n")
    settings = {"HERMES_RL_SEARCH_CORPUS": str(corpus)}
    pages = [
        Tool(name, "browser", "", {"properties": {"url": {"type": "string"}}}, lambda _, args: {"seen": args})
        for name in ("browser_navigate", "browser_snapshot")
    ]
    toolbox = select_tools(["terminal", "file", "web", "browser"], settings=settings, extra=pages).toolbox
    root, local = tmp_path / "root", tmp_path / "local"
    root.mkdir()
    name = 'it\'s a "name"\nof two lines; $(touch no) `touch no` *'
    data = os.urandom(1 << 20) * 50
    (local / "up" / name).mkdir(parents=True)
    (local / "up" / name / name).write_bytes(data)
    (local / "up" / "empty").touch()
    ctx = ToolContext("t", TaskSandbox(lambda: LocalSandbox(root=root)), toolbox, settings=settings)

    assert [one["exit_code"] for one in ctx.upload_dir(local / "up", f"to/{name}")] == [0, 0]
    assert ctx.upload_file(local / "up" / name / name, name)["exit_code"] == 0
    counted = ctx.terminal("find . -type f -size +40M -print0 | tr -cd '\\0' | wc -c; find . -name no | wc -l")
    assert counted["output"].split() == ["2", "0"]
    assert ctx.download_file(name, local / "back") == {"success": True, "bytes": len(data)}
    assert (local / "back").read_bytes() == data
    assert [one["success"] for one in ctx.download_dir(f"to/{name}", local / "down")] == [True, True]
    assert (local / "down" / name / name).read_bytes() == data
    text = "one $HOME 'two'\n" * 100
    assert "error" not in {key for key, value in ctx.write_file(f"{name}.txt", text).items() if value}
    assert "one $HOME 'two'" in str(ctx.read_file(f"{name}.txt"))
    assert "one" in str(ctx.search(r"\$HOME", "."))
    assert ctx.terminal(f"head -c {3 << 20} /dev/zero | tr '\\0' x")["output"] == "x" * (3 << 20)
    assert "Herons" in str(ctx.web_search("herons"))
    assert "Herons wade." in str(ctx.web_extract(["https://a.example/x"]))
    assert ctx.browser_navigate("https://a.example/x") == {"seen": {"url": "https://a.example/x"}}
    assert ctx.browser_snapshot() == {"seen": {}}
    assert json.loads(ctx.call_tool("terminal", {"command": "echo on"}))["output"] == "on\n"
    ctx.cleanup()
    ctx.cleanup()
    assert list(root.iterdir()) == []

"""The agent loop against a model that answers as told, with tools that run in a real sandbox."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.agent.budget import BudgetConfig
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.interfaces import CallContext, ChatMessage, Tool, ToolSchema
from hermes_rl_mcp.agent.loop import HermesAgentLoop
from hermes_rl_mcp.agent.parsers.registry import get_parser
from hermes_rl_mcp.agent.pool import ToolPool
from hermes_rl_mcp.agent.result import AgentResult
from hermes_rl_mcp.agent.sandbox.local import LocalSandbox
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox
from hermes_rl_mcp.errors import InvalidValueError

KEY = "sk-tvly-0123456789abcdef"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _shell(context: CallContext, args: dict[str, Any]) -> Any:
    done = context.sandbox().run(args["command"], timeout_s=60)
    return {"output": done.output.decode(), "exit_code": done.exit_code, "error": done.error}


async def _later(context: CallContext, args: dict[str, Any]) -> Any:
    await asyncio.sleep(0)
    return f"{args['n']} {context.user_task} {context.settings['TAVILY_API_KEY']}"


def _broken(context: CallContext, args: dict[str, Any]) -> Any:
    raise RuntimeError("no luck")


async def _endless(context: CallContext, args: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


def _told(context: CallContext, args: dict[str, Any]) -> Any:
    return {"error": "could not", "exit_code": args["code"]}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TOOLS = [
    Tool("terminal", "terminal", "", _object(command=TEXT), _shell),
    Tool("later", "x", "", _object(n=WHOLE), _later),
    Tool("broken", "x", "", _object(), _broken),
    Tool("endless", "x", "", _object(), _endless),
    Tool("told", "x", "", _object(code=WHOLE), _told),
    Tool("long", "x", "", _object(n=WHOLE), lambda _, args: "x" * args["n"]),
    Tool("read_file", "file", "", _object(n=WHOLE), lambda _, args: "x" * args["n"], result_size_chars=math.inf),
]


class Box:
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in TOOLS]

    def names(self) -> set[str]:
        return {tool.name for tool in TOOLS}

    def get(self, name: str) -> Tool | None:
        return next((tool for tool in TOOLS if tool.name == name), None)


class Model:
    """Says one entry after the other; an exception is raised."""

    def __init__(self, *said: Any) -> None:
        self.said = list(said)
        self.asked: list[dict[str, Any]] = []

    async def chat_completion(self, *, messages: list[ChatMessage], **params: Any) -> Any:
        self.asked.append({"messages": list(messages), **params})
        one = self.said.pop(0)
        if isinstance(one, Exception):
            raise one
        return {"choices": [{"message": one}]} if one else {"choices": []}


def call(name: str, arguments: Any = "{}", number: int = 1) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": text}}


def calls(*some: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(some), **more}


DONE = {"role": "assistant", "content": "done"}


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[TaskSandbox]:
    made = TaskSandbox(lambda: LocalSandbox(root=tmp_path))
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


async def talk(model: Model, sandbox: TaskSandbox, **options: Any) -> AgentResult:
    options = {"toolbox": Box(), "sandbox": sandbox, "settings": {"TAVILY_API_KEY": KEY}, **options}
    return await HermesAgentLoop(model, **options).run([{"role": "user", "content": "do it"}])


@pytest.mark.anyio
async def test_calls_are_answered_in_order_until_the_model_stops(sandbox: TaskSandbox) -> None:
    model = Model(
        calls(
            call("terminal", {"command": "echo one > f"}),
            call("terminal", {"command": "cat f; exit 2"}, 2),
            reasoning_details=[{"text": "hm"}],
        ),
        calls(call("later", {"n": "3"}), content="and", reasoning="so"),
        DONE,
    )
    result = await talk(model, sandbox, max_tokens=7, temperature=0.5)
    assert [one["role"] for one in result.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert json.loads(result.messages[3]["content"]) == {"output": "one\n", "exit_code": 2, "error": None}
    assert result.messages[3]["tool_call_id"] == "c2"
    assert result.messages[5]["content"] == "3 do it ***"
    assert (result.turns_used, result.finished_naturally, result.tool_errors) == (3, True, [])
    assert result.reasoning_per_turn == ["hm", "so", None]
    assert result.messages[1]["reasoning_content"] == "hm"
    assert (model.asked[0]["n"], model.asked[0]["max_tokens"], model.asked[0]["temperature"]) == (1, 7, 0.5)
    assert model.asked[0]["tools"] == Box().schemas()
    assert "extra_body" not in model.asked[0]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("nothing", "{}", "Available tools: broken"),
        ("memory", "{}", "not available in RL environments"),
        ("terminal", '{"command": ', "retry with valid JSON"),
        ("terminal", "[1]", "JSON list"),
        ("terminal", "{}", "command"),
        ("later", '{"n": "many"}', "integer"),
        ("broken", "", "Tool execution failed: RuntimeError: no luck"),
        ("endless", "", "did not end within 0.01 s"),
        ("told", '{"code": -1}', "could not"),
    ],
    ids=["unknown", "memory", "json", "list", "missing", "type", "raises", "hangs", "says-so"],
)
async def test_a_call_that_fails_is_answered_and_recorded(
    name: str, arguments: str, part: str, sandbox: TaskSandbox
) -> None:
    timeout_s = 0.01 if name == "endless" else 60
    result = await talk(Model(calls(call(name, arguments)), DONE), sandbox, tool_timeout_s=timeout_s)
    [error] = result.tool_errors
    assert (error.turn, error.tool_name, error.arguments) == (1, name, arguments)
    assert part in error.error
    assert part in json.loads(result.messages[2]["content"])["error"]
    assert result.finished_naturally


@pytest.mark.anyio
async def test_an_error_of_a_command_that_ran_is_no_tool_error(sandbox: TaskSandbox) -> None:
    result = await talk(Model(calls(call("told", {"code": 1})), DONE), sandbox)
    assert result.tool_errors == []


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [RuntimeError("down"), None], ids=["raises", "empty"])
async def test_a_server_that_fails_ends_the_conversation_and_is_asked_once(
    failure: Exception | None, sandbox: TaskSandbox
) -> None:
    result = await talk(Model(calls(call("long", {"n": 1})), failure), sandbox)
    assert (result.turns_used, result.finished_naturally, len(result.messages)) == (2, False, 3)
    assert result.error


@pytest.mark.anyio
async def test_turns_run_out(sandbox: TaskSandbox) -> None:
    result = await talk(Model(*[calls(call("long", {"n": 1}))] * 3), sandbox, max_turns=3)
    assert (result.turns_used, result.finished_naturally, result.messages[-1]["role"]) == (3, False, "tool")


@pytest.mark.anyio
async def test_calls_in_the_text_are_read_by_the_given_parser_only(sandbox: TaskSandbox) -> None:
    text = 'now <tool_call>{"name": "long", "arguments": {"n": 2}}</tool_call>'
    said = {"role": "assistant", "content": text}
    result = await talk(Model(said, DONE), sandbox, parser=get_parser("hermes"))
    assert (result.messages[1]["content"], result.messages[2]["content"]) == ("now", "xx")
    assert (await talk(Model(said), sandbox)).messages[1:] == [said]


@pytest.mark.anyio
async def test_long_results_are_kept_in_the_sandbox_and_shown_in_part(sandbox: TaskSandbox) -> None:
    budget = BudgetConfig(default_result_size=100, preview_size=10, tool_overrides={"read_file": 5})
    result = await talk(
        Model(calls(call("long", {"n": 101}), call("read_file", {"n": 500}, 2), call("long", {"n": 100}, 3)), DONE),
        sandbox,
        budget_config=budget,
    )
    first, second, third = (one["content"] for one in result.messages[2:5])
    assert first.startswith("<persisted-output>\nThe result has 101 characters")
    assert first.endswith("x" * 10 + "\n</persisted-output>")
    path = first.split("saved to ")[1].split("\n")[0]
    assert sandbox().read_bytes(path) == b"x" * 101
    assert not path.startswith(sandbox().workdir)
    assert (second, third) == ("x" * 500, "x" * 100)


@pytest.mark.anyio
async def test_a_turn_over_its_budget_loses_its_largest_result_first(sandbox: TaskSandbox) -> None:
    budget = BudgetConfig(turn_budget=9_000, preview_size=10)
    some = calls(call("long", {"n": 4_000}), call("long", {"n": 8_000}, 2), call("read_file", {"n": 4_500}, 3))
    result = await talk(Model(some, DONE), sandbox, budget_config=budget)
    assert [one["content"].startswith("<persisted") for one in result.messages[2:5]] == [False, True, False]


@pytest.mark.anyio
async def test_short_answers_are_left_alone_however_many_they_are(sandbox: TaskSandbox) -> None:
    some = calls(*(call("long", {"n": 10}, n) for n in range(300)))
    result = await talk(Model(some, DONE), sandbox, budget_config=BudgetConfig(turn_budget=100, preview_size=10))
    assert [one["content"] for one in result.messages[2:302]] == ["x" * 10] * 300
    with pytest.raises(FileNotFoundError):
        sandbox().list_files(f"{sandbox().tmpdir}/hermes-results")


@pytest.mark.anyio
async def test_a_result_that_cannot_be_kept_says_what_is_missing(tmp_path: Path) -> None:
    gone = TaskSandbox(lambda: LocalSandbox(root=tmp_path))
    gone.close()
    budget = BudgetConfig(default_result_size=100, preview_size=10)
    result = await talk(Model(calls(call("long", {"n": 101})), DONE), gone, budget_config=budget)
    assert result.messages[2]["content"].startswith("xxxxxxxxxx\n[Cut here: 10 of 101 characters")


@pytest.mark.anyio
async def test_a_pool_that_changes_its_size_loses_no_call() -> None:
    pool = ToolPool(1)
    go = threading.Event()
    waiting = [asyncio.create_task(pool.run(lambda n=n: go.wait(60) and n)) for n in range(3)]  # type: ignore[misc]
    await asyncio.sleep(0)
    pool.resize(2)
    assert await pool.run(lambda: "through") == "through"
    go.set()
    assert await asyncio.gather(*waiting) == [0, 1, 2]
    assert pool.size == 2
    with pytest.raises(InvalidValueError, match="tool_pool_size"):
        pool.resize(0)
    pool.close()


def test_the_reward_reaches_the_rollouts_own_sandbox(
    sandbox: TaskSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    local = tmp_path_factory.mktemp("local")
    state: dict[str, Any] = {}
    context = ToolContext("t", sandbox, Box(), settings={"TAVILY_API_KEY": KEY}, state=state)
    data = bytes(range(256)) * 4_000
    (local / "up" / "it's").mkdir(parents=True)
    (local / "up" / "it's" / "a b.bin").write_bytes(data)
    (local / "up" / "empty").touch()
    assert [one["exit_code"] for one in context.upload_dir(local / "up", "deep/er")] == [0, 0]
    assert context.upload_file(local / "none", "x")["exit_code"] == -1
    assert context.upload_dir(local / "none", "x")[0]["exit_code"] == -1
    assert context.terminal('wc -c < "deep/er/it\'s/a b.bin"; exit 4') == {
        "output": f"{len(data)}\n",
        "exit_code": 4,
        "error": None,
    }
    assert context.terminal("sleep 60", timeout=0.2)["exit_code"] == 124
    assert [one["success"] for one in context.download_dir("deep", local / "down")] == [True, True]
    assert (local / "down" / "er" / "it's" / "a b.bin").read_bytes() == data
    assert context.download_file("deep/er/empty", local / "e") == {"success": True, "bytes": 0}
    assert context.download_file("none", local / "e")["success"] is False
    assert context.download_dir("none", local / "e")[0]["success"] is False
    assert context.read_file("x") == {"error": "read_file has no argument 'path'. It takes: n."}
    assert "error" not in context.write_file("made", "no tool of the policy was needed")
    assert context.terminal("cat made")["output"] == "no tool of the policy was needed"
    assert "Unknown tool 'nothing'" in context.call_tool("nothing")
    assert "cannot be had here" in context.call_tool("image_generate", {"prompt": "x"})
    assert context.call_tool("later", {"n": 3}) == '"3  ***"'
    assert "no luck" in context.call_tool("broken")

    class Browser:
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise OSError("it resists")

    state["browser"] = browser = Browser()
    context.cleanup()
    context.cleanup()
    assert browser.closed == 1
    assert context.terminal("true")["exit_code"] == -1


def test_a_task_that_uses_no_sandbox_makes_none(tmp_path: Path) -> None:
    ToolContext("t", TaskSandbox(lambda: LocalSandbox(root=tmp_path)), Box()).cleanup()
    assert list(tmp_path.iterdir()) == []

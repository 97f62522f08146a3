"""The environments terminal-test and hermes-swe: what they ask, what they pay for, and what does not fool them."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from env_rig import END_ID, TINY, Sampler, serving

from environments import hermes_swe_checker, hermes_swe_tasks, terminal_test_tasks
from environments.hermes_swe_env import HermesSweConfig, HermesSweEnv
from environments.hermes_swe_tasks import SweTask
from environments.terminal_test_env import TerminalTestConfig, TerminalTestEnv
from environments.terminal_test_tasks import TerminalTask, grade
from hermes_rl_mcp.agent.context import ToolContext
from hermes_rl_mcp.agent.result import AgentResult, ToolError
from hermes_rl_mcp.agent.sandbox.local import LocalSandbox
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox
from hermes_rl_mcp.agent.toolbox import select_tools
from hermes_rl_mcp.envs import APIServerConfig, Score
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import bundled_environments

SERVERS = [APIServerConfig(base_url="http://127.0.0.1:9/v1", server_type="vllm")]
SAID_NOTHING = AgentResult([{"role": "user", "content": "do it"}])


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[ToolContext]:
    (tmp_path / "root").mkdir()
    toolbox = select_tools(["terminal", "file"], settings={}).toolbox
    made = ToolContext("t", TaskSandbox(lambda: LocalSandbox(root=tmp_path / "root")), toolbox)
    yield made
    made.cleanup()


def terminal_env(**fields: Any) -> TerminalTestEnv:
    return TerminalTestEnv(TerminalTestConfig(**{"tokenizer_name": str(TINY), "group_size": 2, **fields}), SERVERS)


def swe_env(**fields: Any) -> HermesSweEnv:
    return HermesSweEnv(HermesSweConfig(**{"tokenizer_name": str(TINY), "group_size": 2, **fields}), SERVERS)


# terminal-test


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ("579", 1.0),
        (" 579\n\n", 1.0),
        ("The answer is 579 .", 0.5),
        ("123 + 456 = 579", 0.5),
        ("576 577 578 579 580", 0.0),
        ("1579", 0.0),
        ("578", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("\n".join(map(str, range(2000))), 0.0),
    ],
    ids=["exact", "space", "contained", "sum", "guesses", "longer-number", "wrong", "empty", "missing", "every-answer"],
)
def test_the_named_file_is_exact_or_nearly_or_worth_nothing(found: str | None, value: float) -> None:
    task = TerminalTask("t", "~/answer.txt", "579")
    assert grade(task, found, called=True).value == value
    assert grade(task, found, called=False, call_weight=0.2).value == pytest.approx(0.8 * value)
    assert grade(task, found, called=True, call_weight=0.2).value == pytest.approx(0.8 * value + 0.2)


def test_the_reward_reads_the_file_and_waits_for_nothing(ctx: ToolContext) -> None:
    env = terminal_env(call_weight=0.5)
    task = TerminalTask("t", "~/it's $1.txt", "7", {"~/given file": "words\n"})
    env.prepare(task, ctx)
    calls = [{"function": {"name": "terminal", "arguments": "{}"}}]
    failed = AgentResult(
        [{"role": "assistant", "tool_calls": calls}], tool_errors=[ToolError(1, "terminal", "", "", "")]
    )
    assert env.compute_reward(task, failed, ctx).value == 0.0  # a call that failed is none
    ctx.terminal("grep -q words 'given file' && echo 7 > \"it's \\$1.txt\"")
    assert env.compute_reward(task, failed, ctx).value == 0.5
    ctx.terminal('rm it*; ln -s /dev/zero "it\'s \\$1.txt"')
    called = AgentResult([{"role": "assistant", "tool_calls": calls}])
    assert env.compute_reward(task, called, ctx).value == 0.5


@pytest.mark.parametrize("module", [terminal_test_tasks, hermes_swe_tasks], ids=["terminal", "swe"])
def test_tasks_of_training_are_never_asked_in_an_evaluation(module: Any) -> None:
    kinds = list(module.MAKERS)
    held = module.TASKS.for_evaluation(kinds, 40)
    assert [one.text for one in held] == [one.text for one in module.TASKS.for_evaluation(kinds, 40)]
    assert len({one.text for one in held}) == 40
    trained = [module.TASKS.draw(random.Random(seed), kinds) for seed in range(300)]
    assert not {one.text for one in trained} & {one.text for one in held}
    assert len({one.text for one in trained}) > 200
    again = [module.TASKS.draw(random.Random(seed), kinds) for seed in range(300)]
    assert trained == again


def greeter(right: int) -> Any:
    """Does what a greeting asks, for the first ``right`` rollouts; the others leave out the last sign."""
    seen: list[str] = []

    def answer(prompt: list[int], index: int) -> list[int]:
        text = bytes(one for one in prompt if one < 256).decode()
        if "<tool_response>" in text:
            return [*b"done", END_ID]
        said = re.findall(r"text: ([A-Z][a-z ]+ from [A-Z][a-z]+!)", text)[-1]
        seen.append(said)
        content = said if len(seen) <= right else said[:-1]
        call = {"name": "write_file", "arguments": {"path": "~/greeting.txt", "content": content}}
        return [*f"<tool_call>{json.dumps(call)}</tool_call>".encode(), END_ID]

    return answer


@pytest.mark.anyio
async def test_an_evaluation_runs_the_loop_and_scores_it() -> None:
    with serving(Sampler(greeter(right=1))) as sampler:
        config = TerminalTestConfig(tokenizer_name=str(TINY), group_size=2, task_kinds=["greeting"], max_eval_workers=1)
        env = TerminalTestEnv(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
        await env.setup()
        trained, _ = await env.collect_trajectories(await env.get_next_item())
        logged: dict[str, float] = {}
        env.on_metrics(logged.update)
        await env.wandb_log({})
        report = await env.evaluate()
        await env.cleanup()
        await env.server.close()
    assert isinstance(trained, dict) and sorted(trained["scores"]) == [0.0, 1.0]
    assert (logged["train/accuracy"], logged["train/avg_reward"], logged["train/total_rollouts"]) == (0.5, 0.5, 2)
    metrics = getattr(report, "metrics", {})
    assert metrics["eval/n_items"] > 3 and metrics["eval/mean_reward"] == 0.0
    assert metrics["eval/mean_tool_calls"] == 1.0


# hermes-swe

TESTS = "assert double(2) == 4\nassert double(-3) == -6\nassert double([1]) == [1, 1]\n"
TASK = SweTask("Write a function double(n) that returns twice n.", TESTS, "double")
RIGHT = "def double(n):\n    return n * 2\n"
EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(n): return Equal()\n"


def failure(folder: Path, files: Mapping[str, str], task: SweTask = TASK) -> str:
    """Of the checker alone, as the sandbox starts it."""
    for name, text in files.items():
        (folder / name).write_text(text)
    job = {"folder": str(folder), "tests": task.tests, "entry_point": task.entry_point, "mark": "m"}
    argv = [sys.executable, "-I", "-B", hermes_swe_checker.__file__]
    done = subprocess.run(argv, input=json.dumps(job).encode(), capture_output=True, cwd=folder)
    lines = done.stdout.splitlines()
    return str(json.loads(lines[-1])["failure"]) if lines else f"it ended with {done.returncode}"


def verdict(ctx: ToolContext, files: Mapping[str, str], task: SweTask = TASK, **fields: Any) -> Score:
    env = swe_env(**fields)
    for name, text in files.items():
        ctx.write_file(name, text)
    return env.compute_reward(task, SAID_NOTHING, ctx)


@pytest.mark.parametrize(
    "solution",
    [
        "import os\nos._exit(0)\n",
        "import sys\nprint('passed')\nsys.exit(0)\n",
        EQUAL,
        "import builtins\nbuiltins.AssertionError = Exception\ndef double(n): raise AssertionError\n",
        "import sys\nsys.settrace(lambda *_: None)\nsys.excepthook = lambda *_: None\ndef double(n): return None\n",
        "import atexit, os\natexit.register(os._exit, 0)\ndef double(n): return 0\n",
        "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\ndef double(n): return n * 2\n",
        "def double(n):\n    import unittest.mock\n    return unittest.mock.ANY\n",
        "class I(int):\n    def __eq__(self, other): return True\ndef double(n): return I(0)\n",
        "import glob\nfor f in glob.glob('../*.py') + glob.glob('/proc/self/fd/*'):\n"
        "    try: open(f, 'w').write('pass')\n    except OSError: pass\ndef double(n): return 0\n",
        "def double(n):\n    return n *\n",
        "def dooble(n): return 2 * n\n",
        "",
    ],
    ids=[
        *(
            "exit",
            "says-passed",
            "equals-all",
            "patches-assertion",
            "hooks",
            "atexit",
            "kills-tests",
            "any",
            "int-equal",
        ),
        *("overwrites", "syntax", "other-name", "empty"),
    ],
)
def test_a_solution_that_is_none_does_not_pass(solution: str, tmp_path: Path) -> None:
    assert failure(tmp_path, {"solution.py": solution})


@pytest.mark.parametrize(
    ("solution", "tests", "entry_point"),
    [
        (RIGHT, TESTS, "double"),
        (RIGHT, f"import solution\nfrom solution import double\n\ndef test_it():\n    {TESTS.splitlines()[0]}\n", ""),
        (RIGHT, "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1.5) == 3.0\n", "double"),
        (RIGHT, "def check(double):\n    assert double('a') == 'aa'\n\ncheck(double)\n", "double"),
        (
            RIGHT,
            "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
            "        self.assertEqual(double(2), 4)\nif __name__ == '__main__':\n    unittest.main()\n",
            "",
        ),
        (RIGHT, "class TestIt:\n    def test_it(self):\n        assert double(2) == 4\n", ""),
        (RIGHT, "async def test_it():\n    assert double(2) == 4\n", ""),
        (RIGHT, "assert double(10**5000) == 2 * 10**5000\n", ""),
        (
            "from helper import K\nimport math\nclass Stack:\n    def __init__(self): self.held = []\n"
            "    def push(self, one): self.held.append(one)\n    def pop(self): return self.held.pop()\n"
            "def odd(n):\n    if n % 2: raise ValueError('odd \"n\"')\n"
            "    return {(n, K): {n}, 'x': (math.inf, b'\\x00', None)}\n",
            "s = Stack()\ns.push((1, 2))\nassert s.pop() == (1, 2) and s.held == []\n"
            "assert odd(2) == {(2, 7): {2}, 'x': (float('inf'), b'\\0', None)}\n"
            "try:\n    odd(3)\nexcept ValueError as error:\n    assert 'odd' in str(error)\n"
            "else:\n    raise AssertionError\n",
            "",
        ),
    ],
    ids=[
        *("asserts", "test-function", "humaneval", "humanevalpack", "unittest", "pytest-class", "async"),
        *("long-number", "classes-and-values"),
    ],
)
def test_a_right_solution_passes_whatever_form_its_tests_have(
    solution: str, tests: str, entry_point: str, tmp_path: Path
) -> None:
    task = SweTask("t", tests, entry_point)
    assert failure(tmp_path, {"solution.py": solution, "helper.py": "K = 7\n"}, task) == ""
    wrong = solution.replace("2", "3").replace("K)", "0)")
    assert failure(tmp_path, {"solution.py": wrong}, task)


@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        (RIGHT, "import math\n"),
        (RIGHT, "def never(): assert double(2) == 4\n"),
        ("def double(n): raise StopIteration\n", "assert all(map(double, [1, 2]))\n"),
    ],
    ids=["of-nothing", "not-run", "ended-early"],
)
def test_tests_that_looked_at_nothing_pass_nothing(solution: str, tests: str, tmp_path: Path) -> None:
    assert failure(tmp_path, {"solution.py": solution}, SweTask("t", tests, ""))


def test_what_an_agent_prepares_around_its_program_is_of_no_use(ctx: ToolContext) -> None:
    hack = "import builtins, os\nos._exit(0)\n"
    files = dict.fromkeys(
        ("sitecustomize.py", "usercustomize.py", "conftest.py", "checker.py", "json.py", "ast.py"), hack
    )
    files["solution.py"] = "def double(n): return 0\n"
    site = ".local/lib/python3.11/site-packages"
    ctx.terminal(f"mkdir -p {site}; echo 'import os; os._exit(0)' > {site}/x.pth")
    ctx.terminal("printf 'alias python3=true\\nexit 0\\n' | tee .bashrc .profile > .bash_env; mkdir program tests")
    assert verdict(ctx, files).value == 0.1
    ctx.terminal("rm *.py")
    assert verdict(ctx, {}).value == 0.0
    ctx.terminal("mkfifo solution.py; echo 'x = 1' > other.py")
    assert verdict(ctx, {}).value == 0.1  # a new program, though not the one that was asked for
    ctx.terminal("rm solution.py; mkdir solution.py")
    assert verdict(ctx, {}).value == 0.1


def test_a_solution_that_does_not_end_is_ended_with_all_it_started(ctx: ToolContext) -> None:
    endless = "import os\nif os.fork() == 0:\n    os.setsid()\nwhile True: pass\n"
    assert verdict(ctx, {"solution.py": endless}, test_timeout=2).value == 0.1


@pytest.mark.anyio
async def test_rows_of_a_data_set_become_tasks_and_their_tests_stay_hidden(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"def f{n}(x):\n    '''Adds {n}, says \"it's\".'''\n",
            "entry_point": f"f{n}",
            "test_setup": "import math",
            "test": f"def check(f{n}):\n    assert f{n}(1) == {n + 1}\n\ncheck(f{n})",
        }
        for n in range(30)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "no tests"}]))
    env = swe_env(dataset_name=str(file))
    await env.setup()
    held = await env.get_eval_items(100)
    trained = [await env.get_next_item() for _ in range(30 - len(held))]
    assert held and {one.text for one in [*held, *trained]} == {row["prompt"] for row in rows}
    for task in trained:
        prompt = env.format_prompt(task)
        assert task.text.rstrip() in prompt and "assert" not in prompt and "check(" not in prompt
        assert task.tests.startswith("import math\n")
    await env.cleanup()
    file.write_text('{"prompt": "no tests"}\n{"prompt": "none either"}\n')
    with pytest.raises(PreflightError, match="tests in test or test_code or tests"):
        await swe_env(dataset_name=str(file)).setup()


def test_made_tasks_are_solved_by_programs_that_do_what_they_say(ctx: ToolContext) -> None:
    task = hermes_swe_tasks.TASKS.for_evaluation(["scaled"], 1)[0]
    factor, plus = re.findall(r"times (\d+) plus (\d+)", task.text)[0]
    assert verdict(ctx, {"solution.py": f"def scaled(n): return n * {factor} + {plus}\n"}, task).value == 1.0
    assert verdict(ctx, {"solution.py": f"def scaled(n): return n * {factor}\n"}, task).value == 0.1


@pytest.mark.parametrize("env", [TerminalTestEnv, HermesSweEnv])
def test_the_file_of_settings_holds_fields_that_there_are(env: Any) -> None:
    stem = {TerminalTestEnv: "terminal_test_env", HermesSweEnv: "hermes_swe_env"}[env]
    document = yaml.safe_load((bundled_environments() / f"{stem}.yaml").read_text())
    config, servers = env.config_init()
    given = env.env_config_cls.model_validate({**config.model_dump(), **document["env"]})
    assert given == config
    assert [APIServerConfig(**one) for one in document["openai"]] == servers


@pytest.mark.anyio
@pytest.mark.parametrize("made", [terminal_env, swe_env])
async def test_a_data_set_of_which_nothing_is_left_to_train_on_is_refused(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "7", "path": "a", "expected": "7", "test": "assert True"}  # a text that is held out
    file.write_text(f"{json.dumps(row)}\n" * 3)
    with pytest.raises(PreflightError, match=r"rows\.jsonl are held out"):
        await made(dataset_name=str(file)).setup()

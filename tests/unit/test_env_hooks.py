"""What a class lacks is said before anything of it runs: with file, class and hook."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.envs import BaseEnv
from hermes_rl_mcp.envs.hook_rules import HookError, check_hooks, groups_of, messages_of, metrics_of, rollout_of
from hermes_rl_mcp.envs.loading import defaults_of, load_environment
from hermes_rl_mcp.envs.options import parse_flags, resolve
from hermes_rl_mcp.errors import EnvironmentFileError, InvalidValueError

HOOKS = {
    "get_next_item": "async def get_next_item(self): return 1",
    "get_messages": "def get_messages(self, item): return [{'role': 'user', 'content': 'x'}]",
    "score_answer": "def score_answer(self, item, completion): return 1.0",
}


def made(folder: Path, *lines: str, name: str = "Own") -> type[BaseEnv]:
    """An environment with these methods, out of a file."""
    body = "\n".join(lines) or "pass"
    path = folder / "hooked.py"
    head = "from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig\n\n"
    path.write_text(f"{head}class {name}(BaseEnv):\n{textwrap.indent(body, '    ')}\n")
    return load_environment(f"{path}:{name}")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("command", ["serve", "process", "describe"])
def test_a_missing_hook_is_named_with_file_and_class(tmp_path: Path, command: str, hook: str) -> None:
    own = made(tmp_path, *(text for name, text in HOOKS.items() if name != hook))
    with pytest.raises(HookError, match=rf"hooked\.py: class Own does not define {hook}\."):
        check_hooks(own, command)


def test_whoever_makes_the_rollout_needs_no_hooks_of_the_default_one(tmp_path: Path) -> None:
    for rollout in ("collect_trajectory", "collect_trajectories"):
        own = made(tmp_path, HOOKS["get_next_item"], f"async def {rollout}(self, item): return None, []")
        check_hooks(own, "serve")


def test_a_class_that_only_evaluates_is_described_and_evaluated_but_not_trained(tmp_path: Path) -> None:
    own = made(tmp_path, "async def evaluate(self): return {}")
    for command in ("describe", "evaluate", "compare"):
        check_hooks(own, command)
    with pytest.raises(HookError, match="does not define get_messages, get_next_item, score_answer"):
        check_hooks(own, "serve")


def test_evaluate_needs_the_hook(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="class Own does not define evaluate"):
        check_hooks(made(tmp_path, *HOOKS.values()), "evaluate")


def test_a_hook_that_a_base_class_leaves_open_is_missing_too(tmp_path: Path) -> None:
    own = made(
        tmp_path,
        "from hermes_rl_mcp.envs.hook_rules import must_define",
        *HOOKS.values(),
        "@must_define\ndef reward(self): ...",
    )
    with pytest.raises(HookError, match="does not define reward"):
        check_hooks(own, "process")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("def get_next_item(self): return 1", r"hooked\.py:4: Own\.get_next_item is awaited"),
        ("async def get_messages(self, item): return []", r"hooked\.py:4: Own\.get_messages is not awaited"),
        ("async def collect_trajectory(self): return None, []", r"Own\.collect_trajectory is called with one argument"),
        ("def score_answer(self, item): return 1.0", r"hooked\.py:4: Own\.score_answer is called with two arguments"),
    ],
    ids=["not_async", "async", "too_few", "one_of_two"],
)
def test_a_hook_that_cannot_be_called_is_named_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    rest = [text for name, text in HOOKS.items() if f"def {name}(" not in line]
    with pytest.raises(HookError, match=said):
        check_hooks(made(tmp_path, line, *rest), "describe")


@pytest.mark.parametrize(
    ("judge", "result", "said"),
    [
        (rollout_of, 1.0, r"collect_trajectory must return two things.*found float 1\.0"),
        (rollout_of, ({"score": 1}, []), "must give a ScoredDataItem with tokens, masks and scores"),
        (groups_of, ("group", []), "collect_trajectories must give a ScoredDataGroup.*found str 'group'"),
        (groups_of, ({}, 3), "collect_trajectories must return two things"),
        (messages_of, "3+5=", "get_messages must give a list of messages; found str '3"),
        (messages_of, [{"content": "x"}], "get_messages must give a list of messages"),
        (metrics_of, 0.5, "evaluate must give an EvalReport.*found float 0.5"),
        (metrics_of, {"eval/x": "high"}, "evaluate gave str 'high' for the metric 'eval/x'"),
    ],
    ids=["no_pair", "no_item", "no_group", "no_list", "text", "no_role", "number", "no_number"],
)
def test_what_a_hook_must_not_give_is_said(tmp_path: Path, judge: Any, result: Any, said: str) -> None:
    with pytest.raises(HookError, match=said) as caught:
        judge(made(tmp_path, *HOOKS.values()), result)
    assert "Own" in str(caught.value) and ".py" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("BaseEnvConfig(group_size=0), []", "makes a BaseEnvConfig that is not valid: group_size: .*, found 0"),
        ("BaseEnvConfig()", "must return two things"),
        ("object(), []", "gives object where a BaseEnvConfig belongs"),
        ("BaseEnvConfig(), ['http://h/v1']", "gives str where a APIServerConfig belongs"),
    ],
    ids=["field", "one", "config", "server"],
)
def test_config_init_that_gives_something_else_is_named_with_its_line(tmp_path: Path, returned: str, said: str) -> None:
    own = made(tmp_path, *HOOKS.values(), f"@classmethod\ndef config_init(cls): return {returned}")
    with pytest.raises(EnvironmentFileError, match=rf"hooked\.py:7: Own\.config_init {said}"):
        defaults_of(own)


@pytest.mark.parametrize("flag", ["--env.group_size", "--env.group_sise", "--openai.timeout"])
def test_a_bad_value_names_file_class_and_field(tmp_path: Path, flag: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"{flag.lstrip('-')}.*hooked\.py: class Own\)"):
        resolve(made(tmp_path, *HOOKS.values()), parse_flags(["process", flag, "0"]))

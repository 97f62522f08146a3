"""What ``envs check`` says of an environment with tools: a whole group of rollouts, in this process, over real HTTP."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from env_rig import END_ID, TINY, Sampler, serving

from hermes_rl_mcp.contracts.env_checks import CheckFinding
from hermes_rl_mcp.envs import APIServerConfig
from hermes_rl_mcp.envs.checking import Checker
from hermes_rl_mcp.envs.hermes import HermesAgentBaseEnv
from hermes_rl_mcp.envs.hermes_config import HermesAgentEnvConfig
from hermes_rl_mcp.envs.hook_rules import HookError, check_hooks

pytestmark = pytest.mark.anyio

SOURCE = """
from hermes_rl_mcp.agent.interfaces import Tool
from hermes_rl_mcp.envs.hermes import HermesAgentBaseEnv

class Kept(HermesAgentBaseEnv):
    async def get_next_item(self):
        return {"word": "good"}

    def format_prompt(self, item):
        return f"Keep {item['word']}."

    def own_tools(self):
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
        return [Tool("keep", "notes", "Keeps a word.", parameters, keep)]

    def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat kept")["output"] == item["word"])

def keep(context, arguments):
    context.sandbox().write_bytes("kept", arguments["word"].encode())
    return "kept"
"""
CALL = '<tool_call>{"name": "keep", "arguments": {"word": "%s"}}</tool_call>'


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., type[HermesAgentBaseEnv]]]:
    """``load((old, new), ...)``: the class of SOURCE with these changes."""

    def made(*changes: tuple[str, str]) -> type[HermesAgentBaseEnv]:
        text = SOURCE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "kept_checked.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("kept_checked", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules["kept_checked"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kind: type[HermesAgentBaseEnv] = module.Kept
        return kind

    yield made
    sys.modules.pop("kept_checked", None)


def line_of(words: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if words in line)


async def checked(kind: type[HermesAgentBaseEnv], longest: int | None = None, **fields: object) -> list[CheckFinding]:
    """Both parts of a check, one after the other; half of the rollouts keep the right word."""

    def answer(prompt: list[int], index: int) -> list[int]:
        if b"tool_response" in bytes(one for one in prompt if one < 256):
            return [*b"done", END_ID]
        return [*(CALL % ("good", "bad")[next(words) % 2]).encode(), END_ID]

    words, found = iter(range(1000)), list[CheckFinding]()
    with serving(Sampler(answer)) as sampler:
        config = HermesAgentEnvConfig.model_validate(
            {"tokenizer_name": str(TINY), "group_size": 4, "enabled_toolsets": [], "max_token_length": 90, **fields}
        )
        env = kind(config, [APIServerConfig(base_url=f"{sampler.url}/v1", server_type="vllm")])
        env.trainer_max_tokens = longest
        checker = Checker(env, str(sys.modules[kind.__module__].__file__), found.append)
        try:
            await checker.before_sampling()
            if not any(one.verdict == "problem" for one in found):
                await checker.with_model(None, sample=True)
        finally:
            await env.cleanup()
            await env.server.close()
    return found


def named(found: list[CheckFinding], name: str) -> list[CheckFinding]:
    return [one for one in found if one.name == name]


async def test_turns_calls_and_what_cannot_be_had_are_told_of_a_whole_group(
    load: Callable[..., type[HermesAgentBaseEnv]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if "VISION" in name]:
        monkeypatch.delenv(variable)
    found = await checked(load(), enabled_toolsets=["vision"], max_token_length=64)
    tools, missing = named(found, "tools")
    assert (tools.verdict, tools.found) == ("ok", "1: keep (toolsets notes)")
    assert missing.verdict == "skipped" and missing.found.startswith("vision_analyze: set HERMES_RL_VISION_URL")
    assert named(found, "hooks")[0].found == "get_next_item, format_prompt, own_tools, compute_reward"
    assert named(found, "turns")[0].found == "2.0 on average, at most 2; 4 of 4 ended by themselves"
    assert named(found, "tool calls")[0].found == "4: keep 4"
    assert "2 different scores of 4" in named(found, "reward spread")[0].found
    assert not named(found, "tool fault") and not [one for one in found if one.verdict == "problem"]


@pytest.mark.parametrize(
    ("change", "name", "words", "line"),
    [
        (('arguments["word"]', 'arguments["wrd"]'), "tool fault", "the tool keep raised KeyError", "sandbox()."),
        (("def keep(context, arguments)", "def keep(arguments)"), "tool fault", "1 positional", "def keep"),
        (('return f"Keep', 'f"Keep'), "messages", "found NoneType None", "def format_prompt"),
        (('item["word"])', 'item["wrd"])'), "group", "KeyError", "ctx.terminal"),
        (("return [Tool(", "return [Tol("), "tools", "NameError", "return [Tool("),
        (
            ("        return float(ctx", '        item["word"] += "x"\n        return float(ctx'),
            "item",
            "the hooks changed the item",
            "def compute_reward",
        ),
    ],
    ids=["tool", "handler", "prompt", "reward", "own-tools", "mutated"],
)
async def test_a_fault_in_a_tool_or_its_reward_is_named_with_its_line(
    load: Callable[..., type[HermesAgentBaseEnv]], change: tuple[str, str], name: str, words: str, line: str
) -> None:
    kind = load(change)
    problem = next(one for one in await checked(kind) if one.verdict == "problem")
    assert problem.name == name and words in problem.found and problem.fix
    assert problem.where == f"{sys.modules[kind.__module__].__file__}:{line_of(line)}"


async def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_before_anything_is_sampled(
    load: Callable[..., type[HermesAgentBaseEnv]],
) -> None:
    told = named(await checked(load(), longest=100), "messages")
    assert told[0].verdict == "problem" and "max_token_trainer_length is 100" in told[0].found
    assert told[0].where.endswith(f":{line_of('def format_prompt')}")
    told = named(await checked(load(("Keep {", "Keep " + "x" * 400 + "{"))), "messages")
    assert told[0].verdict == "problem" and "the model's context is 512" in told[0].found
    told = named(await checked(load(), max_token_length=500), "messages")
    assert told[0].verdict == "warning" and "so an answer has" in told[0].found


def test_hooks_of_tools_that_cannot_be_called_are_refused(load: Callable[..., type[HermesAgentBaseEnv]]) -> None:
    for change, words in (
        (("item, result, ctx)", "item, result)"), "compute_reward is called with three arguments besides self"),
        (("    def format_prompt", "    async def format_prompt"), "format_prompt is not awaited"),
    ):
        with pytest.raises(HookError, match=words):
            check_hooks(load(change), "process")

"""What ``envs check`` says of an environment and of a group, without a model or a second process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.contracts.env_checks import CheckFinding
from hermes_rl_mcp.contracts.rollout_api import ScoredData, SequenceNotes
from hermes_rl_mcp.envs import BaseEnv
from hermes_rl_mcp.envs.alike import plain
from hermes_rl_mcp.envs.check_group import alignment, form, length, pace, spread
from hermes_rl_mcp.envs.checking import Checker
from hermes_rl_mcp.envs.places import place_of_field
from hermes_rl_mcp.envs.testing import BytesTokenizer

pytestmark = pytest.mark.anyio

GOOD = """
from hermes_rl_mcp.envs import BaseEnv

class Mine(BaseEnv):
    async def setup(self):
        self.at = 0

    async def get_next_item(self):
        self.at += 1
        return {"n": self.at}

    def get_messages(self, item):
        return [{"role": "user", "content": str(item["n"])}]

    def score_answer(self, item, completion):
        return 1.0

    async def get_eval_items(self, count):
        return [{"n": -n} for n in range(1, count + 1)]

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"at": self.at})
"""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., BaseEnv]]:
    """``load((old, new), ...)``: GOOD with these changes, as an environment that has a tokenizer."""

    def made(*changes: tuple[str, str]) -> BaseEnv:
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "mine_checked.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("mine_checked", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["mine_checked"] = module
        spec.loader.exec_module(module)
        env: BaseEnv = module.Mine(module.Mine.env_config_cls(), [])
        env._tokenizer = BytesTokenizer()
        return env

    yield made
    sys.modules.pop("mine_checked", None)


def file_of(env: BaseEnv) -> str:
    return str(sys.modules[type(env).__module__].__file__)


async def found_in(env: BaseEnv) -> list[CheckFinding]:
    found: list[CheckFinding] = []
    await Checker(env, file_of(env), found.append).before_sampling()
    return found


async def test_an_environment_without_fault_gets_no_bad_word(load: Callable[..., BaseEnv]) -> None:
    found = await found_in(load())
    assert [one.verdict for one in found] == ["ok"] * len(found)
    names = [one.name for one in found]
    assert names == ["hooks", "setup", "item", "messages", "held-out items", "held-out items", "position"]
    assert found[4].fingerprint is not None


LINE_OF = {line.strip(): number for number, line in enumerate(GOOD.splitlines(), 1)}


@pytest.mark.parametrize(
    ("change", "name", "words", "line"),
    [
        (("self.at = 0", "self.at = 1 / 0"), "setup", "ZeroDivisionError", LINE_OF["self.at = 0"]),
        (
            ('return {"n": self.at}', "return None"),
            "item",
            "nothing at the moment",
            LINE_OF["async def get_next_item(self):"],
        ),
        (
            ('[{"role": "user", "content": str(item["n"])}]', 'item["m"]'),
            "messages",
            "KeyError",
            LINE_OF['return [{"role": "user", "content": str(item["n"])}]'],
        ),
        (
            ("[{'n': -n}".replace("'", '"'), '[{"n": self.at, "x": __import__("random").random()}'),
            "held-out items",
            "different items",
            LINE_OF["async def get_eval_items(self, count):"],
        ),
        (
            ('{"n": -n}', '{"n": n}'),
            "held-out items",
            "training items are held-out ones",
            LINE_OF["async def get_next_item(self):"],
        ),
        (
            ('{"at": self.at})', '{"at": {1, 2}})'),
            "position",
            "JSON",
            LINE_OF['super().save_checkpoint(step, {"at": self.at})'],
        ),
    ],
    ids=["setup", "item", "messages", "unstable", "overlap", "position"],
)
async def test_a_fault_is_named_with_its_line(
    load: Callable[..., BaseEnv], change: tuple[str, str], name: str, words: str, line: int
) -> None:
    env = load(change)
    problem = next(one for one in await found_in(env) if one.verdict == "problem")
    assert problem.name == name and words in problem.found and problem.fix
    assert problem.where == f"{file_of(env)}:{line}"


async def test_held_out_items_that_differ_in_another_process_are_a_problem(load: Callable[..., BaseEnv]) -> None:
    first = [one.fingerprint for one in await found_in(load()) if one.fingerprint]
    for change, verdict in (((), "ok"), ((("-n}", "-n - 1}"),), "problem")):
        found: list[CheckFinding] = []
        await Checker(load(*change), "", found.append).with_model(first[0], sample=False)
        assert [(one.name, one.verdict) for one in found] == [("held-out items", verdict)]


def test_equal_items_have_the_same_text_whatever_their_order_and_place() -> None:
    class Item:
        pass

    assert plain({"a": {"x", "y", "z"}, "b": (1, 2)}) == plain({"b": [1, 2], "a": {"z", "y", "x"}})
    assert plain(Item()) == plain(Item())
    assert plain({"a": 1}) != plain({"a": 2})


def scored(**changes: Any) -> ScoredData:
    good = {
        "tokens": [[1, 65, 66, 256]],
        "masks": [[-100, 65, 66, 256]],
        "scores": [1.0],
        "inference_logprobs": [[1.0, -0.1, -0.1, -0.1]],
        "messages": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "AB"}]],
    }
    return ScoredData.model_validate({**good, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "ok", "3 of 4 tokens"),
        ({"inference_logprobs": None}, "ok", "no logprobs"),
        ({"masks": [[-100] * 4]}, "problem", "no token to train on"),
        ({"masks": [[1, 65, 66, 256]]}, "problem", "first token"),
        ({"messages": [[{"role": "assistant", "content": "BA"}]]}, "warning", "'BA'"),
    ],
    ids=["good", "text", "all-masked", "prompt", "other-words"],
)
async def test_alignment_of_tokens_masks_and_words(
    load: Callable[..., BaseEnv], changes: dict[str, Any], verdict: str, words: str
) -> None:
    found = alignment(load(), scored(**changes))
    assert found.verdict == verdict and words in found.found


def test_a_group_says_whether_there_is_something_to_learn() -> None:
    assert spread([0.0, 1.0], "f:1").verdict == "ok"
    equal = spread([1.0, 1.0], "f:1")
    assert (equal.verdict, equal.where) == ("warning", "f:1") and equal.fix
    assert form([SequenceNotes()]).verdict == "skipped"
    assert form([SequenceNotes(reward_parts={"format": 0.0}), SequenceNotes(parse_failed=False)]).verdict == "ok"
    assert form([SequenceNotes(reward_parts={"format": 0.0})]).verdict == "warning"
    assert length([SequenceNotes()], 9).verdict == "skipped"
    assert length([SequenceNotes(finish_reason="stop")], 9).verdict == "ok"
    assert length([SequenceNotes(finish_reason="length")], 9).verdict == "warning"
    assert pace(4, 8.0, 7.9, "").verdict == pace(4, 8.0, None, "").verdict == "ok"
    assert pace(4, 8.0, 1.0, "f:1").verdict == "warning"


def test_a_field_is_found_where_it_is_declared_or_else_where_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("make(level=3)\nclass C:\n    level: int = 1\nmake(other=2)\n")
    assert place_of_field(file, "level") == f"{file}:3"
    assert place_of_field(file, "other") == f"{file}:4"
    assert place_of_field(file, "absent") == place_of_field(tmp_path / "none.py", "level") == ""

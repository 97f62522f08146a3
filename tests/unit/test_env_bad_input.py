"""Whatever a hook does, the error says what happened and where: file, class, hook or line, in a bounded text."""

from __future__ import annotations

import asyncio
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.envs import BaseEnv
from hermes_rl_mcp.envs.describe import describe
from hermes_rl_mcp.envs.evaluate import run_evaluation, write_config
from hermes_rl_mcp.envs.hook_rules import HookError, check_hooks
from hermes_rl_mcp.envs.loading import defaults_of, load_environment
from hermes_rl_mcp.envs.options import parse_flags
from hermes_rl_mcp.envs.process import Processor
from hermes_rl_mcp.envs.saying import ERROR_CHARS, said, shown, traceback_of
from hermes_rl_mcp.envs.testing import make
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError, InvalidValueError

HOOKS = {
    "get_next_item": "async def get_next_item(self): return 1",
    "get_messages": "def get_messages(self, item): return [{'role': 'user', 'content': 'x'}]",
    "score_answer": "def score_answer(self, item, completion): return float(len(completion.text))",
    "evaluate": "async def evaluate(self): return {}",
}
GROUP = "{'tokens': [[1, 2]] * 2, 'masks': [[-100, 2]] * 2, 'scores': [1.0, 0.0]"

COLLECT = "async def collect_trajectories(self, item): return"


def made(folder: Path, line: str) -> type[BaseEnv]:
    """An environment with this hook (or attribute) in place of the good one; it begins in line 4 of ``hostile.py``."""
    body = "\n".join(
        [line, *(text for name, text in HOOKS.items() if f"def {name}(" not in line and f"{name} =" not in line)]
    )
    path = folder / "hostile.py"
    head = "import asyncio, typing\nfrom hermes_rl_mcp.envs import *\n"
    path.write_text(f"{head}class Own(BaseEnv):\n{textwrap.indent(body, '    ')}\n")
    return load_environment(f"{path}:Own")


def process(environment: type[BaseEnv], folder: Path, **fields: Any) -> Path:
    """One group of two, written."""

    async def run() -> Path:
        target = str(folder / "groups.jsonl")
        values = {"group_size": 2, "total_steps": 1, "data_path_to_save_groups": target, "include_messages": True}
        env = await make(environment, ["8", "no"], **{"ensure_scores_are_not_same": False, **values, **fields})
        return await Processor(env).run()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("line", "said_of_it"),
    [
        pytest.param(
            "async def get_next_item(self): raise KeyError('q')", r"KeyError: 'q' \(.*hostile\.py:4\)", id="item"
        ),
        pytest.param(
            "async def get_next_item(self): raise asyncio.CancelledError",
            r"CancelledError \(.*hostile\.py:4",
            id="ended",
        ),
        pytest.param(
            "def get_messages(self, item): return [{'role': 'user'}]", r"found NoneType None in message 0", id="none"
        ),
        pytest.param(
            "def get_messages(self, item): return [{'role': 'user', 'content': 5}]",
            r"hostile\.py:4: Own\.get_messages must give text .* found int 5",
            id="number",
        ),
        pytest.param(
            r"def get_messages(self, item): return [{'role': 'user', 'content': '\ud800'}]", "surrogate", id="surrogate"
        ),
        pytest.param(
            "def get_messages(self, item): return [{'role': 'user', 'content': 'x', 'tool': object()}]",
            "Unable to serialize",
            id="object",
        ),
        pytest.param(
            "def score_answer(self, i, c): pass", r"hostile\.py:4: Own\.score_answer gave NoneType None", id="nothing"
        ),
        pytest.param("def score_answer(self, i, c): return float('nan')", r"hostile\.py:4.* gave float nan", id="nan"),
        pytest.param(
            "def score_answer(self, i, c): return Score(1.0, {'part': 'x'})",
            r"gave str 'x' for the part 'part'",
            id="part",
        ),
        pytest.param(
            "def score_answer(self, i, c): return Score(1.0, ['x'])", r"parts by name; found list", id="parts"
        ),
        pytest.param("def score_answer(self, i, c): return 1 / 0", r"ZeroDivisionError.*hostile\.py:4", id="raised"),
        pytest.param("def score_answer(self, i, c): raise asyncio.CancelledError", "CancelledError", id="cancelled"),
        pytest.param("async def collect_trajectories(self, item): return None", "must return two things", id="no_pair"),
        pytest.param(
            "async def collect_trajectories(self, item): return {}, []", r"tokens: Field required", id="empty"
        ),
        pytest.param(
            f"async def collect_trajectories(self, item): return {GROUP}, 'overrides': [5, 6]}}, []",
            "overrides",
            id="notes",
        ),
        pytest.param(
            f"{COLLECT} {GROUP}, 'overrides': [{{'reward_parts': {{'a': 'x'}}}}] * 2}}, []",
            r"overrides of sequence 0: reward_parts\.a",
            id="bad_part",
        ),
        pytest.param(
            f"{COLLECT} {GROUP}, 'group_overrides': {{'group_size': 'x'}}}}, []",
            "group_overrides: group_size is 'x'",
            id="size",
        ),
        pytest.param(
            "async def collect_trajectories(self, item): raise ExceptionGroup('many', [ValueError('the first')])",
            "ValueError: the first",
            id="several",
        ),
        pytest.param(
            "async def collect_trajectories(self, item): await asyncio.Event().wait()",
            "worker_timeout = 0.2 s",
            id="hangs",
        ),
        pytest.param(
            "async def postprocess_histories(self, groups): return 5", r"Own\.postprocess_histories must", id="after"
        ),
        pytest.param("async def postprocess_histories(self, groups): return []", "dropped it", id="dropped"),
    ],
)
def test_a_hook_that_does_what_it_must_not_is_named_by_process(tmp_path: Path, line: str, said_of_it: str) -> None:
    limit_s = 0.2 if "hangs" in said_of_it or "0.2" in said_of_it else 60
    with pytest.raises(HermesRLError, match=f"(?s){said_of_it}") as failed:
        process(made(tmp_path, line), tmp_path, worker_timeout=limit_s)
    assert "hostile.py" in str(failed.value) and "Own" in str(failed.value)
    assert "0 of 1 groups were written" in failed.value.hint


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_what_is_said_of_an_error_is_one_bounded_line_whatever_its_text_does() -> None:
    assert len(said(ValueError("x" * 3_000_000))) < ERROR_CHARS + 100
    assert said(ValueError("two\nlines \ud800")) == "ValueError: two lines \\ud800"
    assert said(Silent()) == "Silent: (its own text cannot be made)"
    assert "cannot be made" in shown(Silent())
    assert len(traceback_of(ValueError("x" * 3_000_000))) < 30_000
    assert "Silent" in traceback_of(Silent())


@pytest.mark.parametrize(
    ("line", "said_of_it"),
    [
        pytest.param("name = 5", "has name = int 5", id="name"),
        pytest.param("name = '../x'", "has name = str '../x'", id="path"),
        pytest.param("trainer_defaults = 5", "has trainer_defaults = int 5", id="trainer"),
        pytest.param("trainer_defaults = {'learning_rate': object()}", "has trainer_defaults", id="value"),
        pytest.param("typical_tokens = 5", "has typical_tokens = int 5", id="tokens"),
        pytest.param("get_messages = 5", "has get_messages = int 5, where a function belongs", id="hook"),
        pytest.param(
            "@staticmethod\ndef get_messages(item): return []", "is called on the environment object", id="static"
        ),
        pytest.param(
            "def config_init(cls): return BaseEnvConfig(), []", "is called on the class.* @classmethod", id="defaults"
        ),
        pytest.param(
            "async def save_checkpoint(self, step, data=None): pass", "save_checkpoint is not awaited", id="position"
        ),
        pytest.param("def wandb_log(self, metrics=None): pass", "wandb_log is awaited", id="metrics"),
    ],
)
def test_a_class_that_cannot_work_is_refused_before_it_is_made(tmp_path: Path, line: str, said_of_it: str) -> None:
    with pytest.raises(HookError, match=said_of_it) as refused:
        check_hooks(made(tmp_path, line), "describe")
    assert "hostile.py" in str(refused.value) and "Own" in str(refused.value)


def test_a_hook_whose_name_is_misspelt_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    own = made(tmp_path, "def score_answr(self, item, completion): return 1.0\nscore_answer = BaseEnv.score_answer")
    with pytest.raises(HookError, match="Is score_answr meant to be score_answer"):
        check_hooks(own, "serve")


@pytest.mark.parametrize(
    ("lines", "said_of_it"),
    [
        pytest.param(
            "class C(BaseEnvConfig):\n    group_size: int = 'many'\nenv_config_cls = C",
            r"makes a C that is not valid: group_size: .* found 'many' \(.*hostile\.py:5\)",
            id="field",
        ),
        pytest.param(
            "@classmethod\nasync def config_init(cls): return 1", "must return two things.* found coroutine", id="async"
        ),
    ],
)
def test_defaults_that_are_not_valid_name_the_field_and_its_line(tmp_path: Path, lines: str, said_of_it: str) -> None:
    with pytest.raises(EnvironmentFileError, match=said_of_it):
        defaults_of(made(tmp_path, lines))


def test_a_field_that_cannot_be_told_as_data_is_named_with_its_line(tmp_path: Path) -> None:
    lines = "class C(BaseEnvConfig):\n    reward: typing.Callable = print\nenv_config_cls = C"
    with pytest.raises(EnvironmentFileError, match=r"C\.reward is of a type .*hostile\.py:5\)"):
        describe(made(tmp_path, lines))


@pytest.mark.parametrize(
    ("line", "said_of_it"),
    [
        pytest.param("return 'good'", "found str 'good'", id="text"),
        pytest.param("return EvalReport('good')", "found str 'good'", id="report"),
        pytest.param("return EvalReport({'a': 'high'})", "gave str 'high' for the metric 'a'", id="metric"),
        pytest.param("return EvalReport({'a': 1.0}, [5])", "samples as a list of mappings; found int 5", id="samples"),
    ],
)
def test_an_evaluation_that_gives_something_else_is_named(tmp_path: Path, line: str, said_of_it: str) -> None:
    async def run() -> None:
        await run_evaluation(await make(made(tmp_path, f"async def evaluate(self): {line}")))

    with pytest.raises(HookError, match=rf"hostile\.py:4: Own\.evaluate .*{said_of_it}"):
        asyncio.run(run())


def test_what_json_cannot_say_of_an_evaluation_is_null_or_text(tmp_path: Path) -> None:
    line = (
        "async def evaluate(self): await self.evaluate_log({'eval/a': float('nan')}, task_name='t', model_name='m', "
        r"samples=[{'o': object, 't': '\ud800', 'n': float('inf')}], generation_parameters={'k': {1}})"
    )

    async def run() -> None:
        await run_evaluation(await make(made(tmp_path, line), data_dir_to_save_evals=str(tmp_path / "e")))

    asyncio.run(run())
    document = json.loads((tmp_path / "e" / "metrics.json").read_text())
    assert document["results"] == {"atropos|t|0": {"a": None}, "all": {"a": None}}
    assert document["config_general"]["model_name"] == "m"
    sample = json.loads((tmp_path / "e" / "samples.jsonl").read_text())
    assert (sample["t"], sample["n"], type(sample["o"])) == ("\ud800", None, str)


def test_places_that_cannot_be_written_name_the_field(tmp_path: Path) -> None:
    own = made(tmp_path, "name = 'own'")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValueError, match=r"env\.data_path_to_save_groups: .*cannot be made: "):
        process(own, tmp_path, data_path_to_save_groups=str(tmp_path / "file" / "x.jsonl"))
    with pytest.raises(InvalidValueError, match=r"env\.data_path_to_save_groups: .* is a folder"):
        process(own, tmp_path, data_path_to_save_groups=str(tmp_path))
    config, servers = defaults_of(own)
    with pytest.raises(InvalidValueError, match=r"env\.data_dir_to_save_evals: .*cannot be written: File exists"):
        write_config(config.model_copy(update={"data_dir_to_save_evals": str(tmp_path / "file")}), servers)


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["describe", "--env.group_size", "3"], "--env.group_size"),
        (["describe", "--config", "c.yaml"], "--config"),
        (["process", "--seed", "3"], "--seed"),
    ],
    ids=["field", "config", "seed"],
)
def test_a_flag_that_the_command_would_not_look_at_is_refused(words: list[str], unused: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{words[0]} does not take {unused}"):
        parse_flags(words)

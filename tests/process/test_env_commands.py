"""describe, process and evaluate as a person or the server runs them: files, standard output, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from env_rig import END_ID, TINY, Sampler, child_environ, json_lines, serving, write_env

from hermes_rl_mcp.contracts.environments import EnvironmentSchema, ValidationReply
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.paths import bundled_environments, install_root
from hermes_rl_mcp.redact import MASK

TIMEOUT_S = 200
GSM8K = bundled_environments() / "gsm8k_tinker.py"
SAMPLE = bundled_environments() / "gsm8k_sample"


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    with serving(Sampler()) as running:
        yield running


Done = subprocess.CompletedProcess[str]


def command(environ: dict[str, str], *words: str, cwd: Path, file_only: bool = False) -> Done:
    start = [sys.executable] if file_only else [sys.executable, "-P", "-m", "hermes_rl_mcp.envs"]
    return subprocess.run(
        [*start, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=child_environ(environ),
        cwd=cwd,
        timeout=TIMEOUT_S,
        check=False,
    )


def sampling(sampler: Sampler, *, group_size: int = 2, server_type: str = "vllm") -> list[str]:
    return [
        *("--openai.base_url", f"{sampler.url}/v1", "--openai.server_type", server_type),
        *("--env.tokenizer_name", str(TINY), "--env.group_size", str(group_size), "--env.max_token_length", "64"),
    ]


def test_describe_gives_fields_as_json_on_a_standard_output_that_nothing_else_touches(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "sibling.py").write_text("WORD = 'from a sibling'\n")
    extra = """
import os
from enum import Enum
from sibling import WORD
print("printed at import")
os.write(1, b"written to descriptor 1\\n")

class Colour(Enum):
    RED = "red"
    BLUE = "blue"

class CountingConfig(BaseEnvConfig):
    colour: Colour = Colour.RED
    "Which one."
    names: list[str] = []
    share: float | None = None

class OtherEnv(CountingEnv):
    env_config_cls = CountingConfig
    trainer_defaults = {"learning_rate": 0.001}

    @classmethod
    def config_init(cls):
        print("printed in config_init")
        return CountingConfig(colour=Colour.BLUE, names=[WORD]), APIServerConfig(model_name="m")
"""
    spec = f"{write_env(tmp_path, extra)}:OtherEnv"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = command(environ, spec, "describe", cwd=elsewhere)
    schema = EnvironmentSchema.model_validate_json(done.stdout)
    assert {"printed at import", "written to descriptor 1", "printed in config_init"} <= set(done.stderr.splitlines())
    fields = {field.name: field for field in schema.fields}
    assert (schema.name, schema.class_name, schema.config_class) == ("counting", "OtherEnv", "CountingConfig")
    colour = fields["colour"]
    assert (colour.type, colour.default, colour.description) == ("'red' | 'blue'", "blue", "Which one.")
    assert colour.json_schema["enum"] == ["red", "blue"]
    assert (fields["names"].type, fields["names"].default) == ("list[str]", ["from a sibling"])
    assert (fields["share"].type, fields["share"].default) == ("float | None", None)
    assert fields["eval_handling"].default == "STOP_TRAIN"
    assert schema.server["model_name"] == "m"
    assert schema.trainer_defaults == {"learning_rate": 0.001}


def test_describe_judges_values_by_the_environments_own_class(tmp_path: Path, environ: dict[str, str]) -> None:
    values = {"group_size": "8", "use_wandb": "no", "batch_size": "many", "nonsense": 1, "eval_limit_ratio": 2}
    (tmp_path / "in.json").write_text(json.dumps(values))
    words = ["describe", "--output", str(tmp_path / "out.json"), "--values", str(tmp_path / "in.json")]
    done = command(environ, f"{write_env(tmp_path)}:CountingEnv", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    reply = ValidationReply.model_validate_json((tmp_path / "out.json").read_text())
    assert reply.ok is False
    assert reply.values == {"group_size": 8, "use_wandb": False}
    assert set(reply.errors) == {"batch_size", "nonsense", "eval_limit_ratio"}


@pytest.mark.parametrize(
    ("extra", "words", "said"),
    [
        ("\nimport no_such_package\n", ["describe"], "ModuleNotFoundError: No module named 'no_such_package'"),
        ("", ["describe", "--flag", "1"], "Unknown flag --flag"),
        ("\nclass SecondEnv(BaseEnv): pass\n", ["describe"], "defines 2 environments: CountingEnv, SecondEnv"),
        ("", ["process", "--env.total_steps", "0"], "total_steps"),
    ],
)
def test_what_is_wrong_is_said_in_the_last_line_with_exit_status_1(
    tmp_path: Path, environ: dict[str, str], extra: str, words: list[str], said: str
) -> None:
    done = command(environ, str(write_env(tmp_path, extra)), *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr.strip().splitlines()[-1]


def test_process_writes_one_line_per_group_and_never_over_an_older_file(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    target = tmp_path / "out" / "groups.jsonl"
    target.parent.mkdir()
    target.write_text("older\n")
    sampler.answer = lambda prompt, index: [*b"<b>", 48 + index, END_ID]
    words = ["process", "--env.total_steps", "3", "--env.data_path_to_save_groups", str(target)]
    extra = "\nif __name__ == '__main__':\n    CountingEnv.cli()\n"
    # As a person does it: the file itself is the program.
    done = command(environ, str(write_env(tmp_path, extra)), *words, *sampling(sampler), cwd=tmp_path, file_only=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert target.read_text() == "older\n"
    lines = json_lines(target.with_name("groups_1.jsonl"))
    assert len(lines) == 3
    assert set(lines[0]) == set(ScoredData.model_fields)
    group = ScoredData.model_validate(lines[0])
    assert group.messages is not None and group.overrides is not None
    assert [one[-1]["content"] for one in group.messages] == ["<b>0", "<b>1"]
    assert group.overrides[0]["reward_parts"] == {"correct": 0.0}
    page = target.with_name("groups_1.html").read_text()
    assert "&lt;b&gt;0" in page
    assert "<b>0" not in page
    assert "group 3 of 3 written" in done.stderr


def test_process_works_against_an_endpoint_that_gives_only_text(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    spec = str(write_env(tmp_path))
    words = [*sampling(sampler, server_type="openai"), "--env.total_steps", "1"]
    done = command(environ, spec, "process", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [line] = json_lines(tmp_path / "data" / "counting.jsonl")
    assert line["inference_logprobs"] is None
    assert [tokens[-2:] for tokens in line["tokens"]] == [[ord("8"), END_ID]] * 2
    assert sampler.requests[0]["path"] == "/v1/chat/completions"


def test_process_gives_up_after_bounded_tries_and_keeps_what_it_has(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    extra = """
    async def collect_trajectories(self, item):
        if item > 1:
            raise ValueError(f"item {item} is broken")
        return await super().collect_trajectories(item)
"""
    words = [*sampling(sampler), "--env.total_steps", "3", "--env.max_num_workers", "1"]
    done = command(environ, str(write_env(tmp_path, extra)), "process", *words, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ValueError: item 2 is broken" in last
    assert "1 of 3 groups were written" in last
    assert len(json_lines(tmp_path / "data" / "counting.jsonl")) == 1


def answers_of(prompt: list[int], index: int) -> list[int]:
    """Completion 0 right for every problem of the sample, 1 a wrong number in a box, 2 no box."""
    text = bytes(one for one in prompt if one < 256).decode()
    gold = next(
        row["answer"].rsplit("#", 1)[-1].strip()
        for name in ("train", "test")
        for row in json_lines(SAMPLE / f"{name}.jsonl")
        if row["question"] in text
    )
    return [*[f"<think>\\boxed{{1}}</think>\\boxed{{{gold}}}", "\\boxed{-0.5}", "no idea"][index].encode(), END_ID]


def test_real_gsm8k_problems_are_scored_by_their_boxed_answer(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    sampler.answer = answers_of
    own = ["--env.data_dir", str(SAMPLE), "--env.format_weight", "0.25", "--env.total_steps", "2"]
    done = command(environ, str(GSM8K), "process", *own, *sampling(sampler, group_size=3), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in json_lines(tmp_path / "data" / "gsm8k.jsonl"):
        assert line["scores"] == [1.0, 0.25, 0.0]
        parts = [one["reward_parts"] for one in line["overrides"]]
        assert [(part["correct"], part["format"]) for part in parts] == [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]


def test_evaluate_writes_metrics_and_samples_of_the_test_split(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    sampler.answer = answers_of
    own = ["--env.data_dir", str(SAMPLE), "--env.eval_limit", "4", "--env.data_dir_to_save_evals", str(tmp_path / "e")]
    own += ["--openai.api_key", "only for this server"]
    done = command(environ, str(GSM8K), "evaluate", *own, *sampling(sampler), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "e" / "metrics.json").read_text())
    assert document["results"]["atropos|gsm8k|0"] == document["results"]["all"]
    assert document["results"]["all"]["percent_correct"] == 1.0
    assert document["config_general"]["generation_parameters"]["temperature"] == 0.0
    asked = yaml.safe_load((tmp_path / "e" / "evaluate_config.yaml").read_text())
    assert (asked["env"]["eval_limit"], asked["openai"][0]["server_type"]) == (4, "vllm")
    assert (asked["env"]["tokenizer_name"], asked["openai"][0]["api_key"]) == (str(TINY), MASK)
    samples = json_lines(tmp_path / "e" / "samples.jsonl")
    assert len(samples) == 4
    expected = {"messages", "question", "gold_answer", "gold_parsed", "model_parsed", "score", "correct"}
    assert expected <= set(samples[0])
    assert {request["temperature"] for request in sampler.requests} == {0.0}


def test_a_data_folder_without_its_files_is_refused_before_anything_starts(
    tmp_path: Path, environ: dict[str, str], sampler: Sampler
) -> None:
    words = ["process", "--env.data_dir", str(tmp_path / "nowhere"), *sampling(sampler)]
    done = command(environ, str(GSM8K), *words, cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere has no train.jsonl and no test.jsonl" in done.stderr
    assert sampler.requests == []


def test_an_unreachable_hub_leads_to_data_dir(tmp_path: Path, environ: dict[str, str], sampler: Sampler) -> None:
    done = command({**environ, "HF_HOME": str(tmp_path)}, str(GSM8K), "process", *sampling(sampler), cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "could not be loaded from the Hub" in last
    assert "data_dir" in last


def test_the_sdk_and_an_environment_file_load_neither_torch_nor_datasets(environ: dict[str, str]) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import gsm8k_tinker, hermes_rl_mcp.envs.commands\n"
        "from hermes_rl_mcp.envs.tokenizer import load_tokenizer\n"
        "heavy = ('torch', 'transformers', 'datasets', 'math_verify', 'numpy', 'peft')\n"
        "before = [name for name in heavy if name in sys.modules]\n"
        "load_tokenizer(sys.argv[2]).apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "print(before, 'torch' in sys.modules)\n"
    )
    words = ["-c", code, str(bundled_environments()), str(TINY)]
    done = command(environ, *words, cwd=install_root(), file_only=True)
    assert done.stdout.strip() == "[] False", done.stderr

"""Command line, YAML and config_init become one validated config; nothing given is ignored."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Self

import pytest
from pydantic import Field, model_validator

from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandling
from hermes_rl_mcp.envs.options import Options, parse_flags, resolve
from hermes_rl_mcp.errors import InvalidValueError


class OwnConfig(BaseEnvConfig):
    label: str = "none"
    judge_key: str = Field("", max_length=8)
    words: list[str] = Field(default_factory=lambda: ["a"])
    limit: float | None = 0.5

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.limit == 0 and self.words == ["a"]:
            raise ValueError("a limit of 0 leaves no words.")
        return self


class OwnEnv(BaseEnv):
    name = "own"
    env_config_cls = OwnConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return OwnConfig(group_size=6, total_steps=9), [APIServerConfig(base_url="http://h/v1", model_name="m")]


def options(*words: str, yaml_text: str | None = None, folder: Path | None = None, **forced: Any) -> Options:
    arguments = ["process", *words]
    if yaml_text is not None:
        assert folder is not None
        (folder / "c.yaml").write_text(yaml_text)
        arguments += ["--config", str(folder / "c.yaml")]
    return resolve(OwnEnv, parse_flags(arguments), forced)


def test_command_line_wins_over_yaml_which_wins_over_config_init(tmp_path: Path) -> None:
    text = "env: {group_size: 7, total_steps: 8}\nopenai: {model_name: from-yaml}"
    chosen = options("--env.group_size", "3", yaml_text=text, folder=tmp_path)
    assert (chosen.config.group_size, chosen.config.total_steps) == (3, 8)
    assert (chosen.servers[0].model_name, chosen.servers[0].base_url) == ("from-yaml", "http://h/v1")


def test_a_commands_own_defaults_lie_between_config_init_and_yaml(tmp_path: Path) -> None:
    chosen = options(yaml_text="env: {total_steps: 4}", folder=tmp_path, group_size=2, total_steps=1)
    assert (chosen.config.group_size, chosen.config.total_steps) == (2, 4)


@pytest.mark.parametrize("words", [["--env.steps_per_eval", "-1"], ["--env.steps_per_eval=-1"]])
def test_minus_one_is_a_value_with_and_without_an_equals_sign(words: list[str]) -> None:
    assert options(*words).config.steps_per_eval == -1


def test_values_take_the_type_of_their_field() -> None:
    words = ["--env.use_wandb", "false", "--env.label", "123", "--env.words", "[x, y]", "--env.limit", "null"]
    words += ["--env.worker_timeout=1e-3", "--env.eval_handling", "LIMIT_TRAIN"]
    config = options(*words).config
    assert isinstance(config, OwnConfig)
    assert (config.use_wandb, config.label, config.words, config.limit) == (False, "123", ["x", "y"], None)
    assert (config.worker_timeout, config.eval_handling) == (0.001, EvalHandling.LIMIT_TRAIN)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--env.groupsize", "8"], "group_size"),
        (["--openai.base", "x"], "base_url"),
        (["--verbose", "1"], "Unknown flag --verbose"),
        (["--env.use_wandb"], "needs a value"),
        (["--env.use_wandb", "--env.group_size", "2"], "needs a value"),
        (["--env.group_size", "many"], "env.group_size"),
        (["again"], "Expected one command"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(InvalidValueError) as refused:
        options(*words)
    assert said in str(refused.value)


def test_a_misspelt_yaml_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"ensure_scores_are_not_same"):
        options(yaml_text="env: {ensure_scores_not_the_same: true}", folder=tmp_path)


def test_a_rule_across_fields_is_said_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"^env: Value error, a limit of 0 leaves no words\. \("):
        options(yaml_text="env: {limit: 0}", folder=tmp_path)


@pytest.mark.parametrize("given", ["$HERMES_RL_SECRET_JUDGE", "plain-and-secret"])
def test_a_secret_that_does_not_fit_its_field_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("HERMES_RL_SECRET_JUDGE", "plain-and-secret")
    with pytest.raises(InvalidValueError, match=r"^env\.judge_key: .* at most 8 characters") as refused:
        options(yaml_text=f"env: {{judge_key: {given}}}", folder=tmp_path)
    assert "plain-and-secret" not in "".join(traceback.format_exception(refused.value))


def test_sections_of_other_processes_are_left_alone_and_a_run_names_its_directory(tmp_path: Path) -> None:
    run = dict.fromkeys(("run_id", "environment", "env_file", "env_class", "env_sha256", "profile"), "x")
    run |= dict.fromkeys(("base_model", "model_path", "nonce", "path_prefix"), "x")
    chosen = options(yaml_text=f"run: {run}\nports: {{a: 1}}\ntrainer: {{b: 2}}\nslurm: true", folder=tmp_path)
    assert chosen.run_dir == tmp_path
    assert chosen.slurm is True
    assert options(yaml_text="env: {}", folder=tmp_path).run_dir is None


def test_a_yaml_list_decides_how_many_servers_there_are(tmp_path: Path) -> None:
    text = "openai:\n- {base_url: 'http://a/v1'}\n- {base_url: 'http://b/v1', server_type: vllm}"
    chosen = options("--openai.timeout", "7", yaml_text=text, folder=tmp_path)
    assert [server.base_url for server in chosen.servers] == ["http://a/v1", "http://b/v1"]
    assert [(server.timeout, server.model_name) for server in chosen.servers] == [(7, "m"), (7, "m")]


def test_the_run_config_of_the_supervisor_is_understood(tmp_path: Path) -> None:
    from env_rig import write_config

    path = write_config(tmp_path, {"group_size": 4}, {"base_url": "http://h/v1", "server_type": "vllm", "timeout": 5})
    chosen = resolve(OwnEnv, parse_flags(["serve", "--config", str(path)]))
    assert (chosen.run_dir, chosen.config.group_size, chosen.servers[0].timeout) == (tmp_path, 4, 5)
    assert chosen.run is not None
    assert chosen.run.nonce == "nonce"

"""What a configuration may be told by an agent: no names that are options, no keys, no addresses of the machine's own
network, no files elsewhere, no foreign code."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.environments import EnvironmentSchema, FieldInfo
from hermes_rl_mcp.contracts.profiles import HERMES, LOCAL, Profile
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.envs.config import BaseEnvConfig
from hermes_rl_mcp.envs.options import parse_flags
from hermes_rl_mcp.envs.options import resolve as resolve_options
from hermes_rl_mcp.errors import InvalidValueError, LockedFieldError
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.addresses import address_of, hosts_of, is_metadata_service, needs_permission
from hermes_rl_mcp.runs.configuration.checks import check_edit, check_model, check_value
from hermes_rl_mcp.runs.configuration.resolve import Resolution, resolve
from hermes_rl_mcp.runs.receivers import receivers

HOME = Home(Path("/home/u/.hermes"))


def resolution(profile: Profile = LOCAL, **edits: Any) -> Resolution:
    """An environment with the fields that matter here."""
    base = [
        FieldInfo(name=name, type="int", default=value)
        for name, value in {"group_size": 4, "batch_size": 8, "total_steps": 3, "max_token_length": 16}.items()
    ]
    more = [
        FieldInfo(name=name, type="str", default="")
        for name in (
            *("tokenizer_name", "wandb_name", "data_path_to_save_groups", "judge_url", "judge_api_key", "judge"),
            "trust_remote_code",
        )
    ]
    schema = EnvironmentSchema(name="e", class_name="E", config_class="C", fields=[*base, *more])
    return resolve(schema, profile, edits)


@pytest.mark.parametrize("field", ["model_name", "wandb_project", "wandb_group", "wandb_run_name"])
@pytest.mark.parametrize("name", ["--config=/x", "-rf", "a\nb", "a\x00b", "a\x1b[2J", "\u202eb", "x" * 301], ids=ascii)
def test_sec_13_a_name_that_another_program_could_misread_is_refused(field: str, name: str) -> None:
    with pytest.raises(InvalidValueError):
        check_value(resolution(), field, name)


def test_sec_13_shell_characters_in_a_label_are_only_characters() -> None:
    """Nothing of ours runs a shell (see the test over the sources), so they may stay."""
    check_value(resolution(), "wandb_project", "$(id) `id`; rm -rf / && \"'")


@pytest.mark.parametrize(
    "model",
    [
        *("Qwen/../../etc", "Qwen/a/b", "../Qwen/x", "builtin:../tiny", "Qwen/$(id)", "Qwen/a b", "Qwen/a\n", "Qwen/"),
        *("file:///etc/passwd", "https://evil/x", "Qwen\\x", "~/model", "./Qwen/x", "/models/../etc", "//host/share"),
        *("", " ", "/models/./x"),
    ],
    ids=ascii,
)
def test_sec_13_a_model_is_a_hub_id_or_a_plain_path_and_nothing_in_between(model: str) -> None:
    profile = LOCAL.model_copy(update={"allowed_models": ["*"]})
    with pytest.raises(InvalidValueError):
        check_model(profile, model)


@pytest.mark.parametrize("model", ["builtin:tiny", "Qwen/Qwen3-0.6B", "gpt2", "/models/mine"])
def test_sec_13_ordinary_models_pass(model: str) -> None:
    check_model(LOCAL.model_copy(update={"allowed_models": ["*"]}), model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", value) for value in (math.nan, math.inf, -1.0, 0.0, 2.0, "fast", None, [1])),
        *(("lora_rank", value) for value in (0, -1, 10**9, 1.5, "many", {})),
        ("seed", -1),
        ("loss_fn", "__import__('os').system('id')"),
        ("no_such_field", 1),
    ],
)
def test_sec_14_the_trainers_schema_takes_only_what_it_means(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        TrainerConfig.model_validate({field: value})


@pytest.mark.parametrize("field", ["inference_weight", "worker_timeout", "eval_limit_ratio"])
def test_sec_14_an_environments_numbers_are_numbers(field: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValidationError):
            BaseEnvConfig.model_validate({field: value})


def test_sec_14_yaml_builds_no_objects(tmp_path: Path) -> None:
    from hermes_rl_mcp.envs import BaseEnv

    class Plain(BaseEnv):
        @classmethod
        def config_init(cls) -> Any:
            return BaseEnvConfig(), []

    mark = tmp_path / "executed"
    evil = tmp_path / "config.yaml"
    evil.write_text(f"env: !!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises(InvalidValueError, match="not YAML"):
        resolve_options(Plain, parse_flags(["serve", "--config", str(evil)]))
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(evil.read_text())
    text = f"!!python/object/apply:os.system ['touch {mark}']"
    options = resolve_options(Plain, parse_flags(["serve", "--env.wandb_name", text]))
    assert options.config.wandb_name == text, "on the command line it is text like any other"
    assert not mark.exists()


@pytest.mark.parametrize("profile", [LOCAL, HERMES], ids=lambda profile: profile.name)
def test_sec_17_no_tool_can_turn_on_a_models_code(profile: Profile) -> None:
    found = resolution(profile)
    assert found.fields["trust_remote_code"].value is False
    with pytest.raises(LockedFieldError):
        found.editable("trust_remote_code")
    assert "trust_remote_code" not in TrainerConfig.model_fields


METADATA = [
    *(
        "http://169.254.169.254/latest/meta-data",
        "https://169.254.169.254:80",
        "http://2852039166/",
        "http://0xA9FEA9FE",
    ),
    *("http://0251.0376.0251.0376/", "http://[::ffff:169.254.169.254]/", "http://[64:ff9b::a9fe:a9fe]/"),
    *("http://[fe80::1%25eth0]:8000/", "http://169.254.1.2", "http://metadata.google.internal/x", "http://METADATA./"),
    *("http://user:pw@169.254.169.254/", "169.254.169.254:80", "http://[fd00:ec2::254]/", "http://224.0.0.1/"),
    "first http://example.org then http://169.254.169.254/ too",
]


@pytest.mark.parametrize("url", METADATA)
def test_sec_23_the_machines_metadata_service_is_no_judge_however_it_is_spelled(url: str) -> None:
    assert any(is_metadata_service(host) for host in hosts_of(url))
    for value in (url, {"judge": [url]}):
        with pytest.raises(InvalidValueError, match="metadata service"):
            check_value(resolution(), "judge_url", value)


def test_sec_23_a_host_of_the_local_network_is_the_operators_to_allow() -> None:
    for url in ("http://192.168.1.7:8000/v1", "http://10.0.0.3/v1", "http://[fd12::1]/v1"):
        with pytest.raises(InvalidValueError, match="HERMES_RL_ALLOW_HOSTS"):
            check_edit(resolution(), HOME, "judge_url", url)
    allowed = load_settings({"HERMES_HOME": "/nowhere", "HERMES_RL_ALLOW_HOSTS": "192.168.1.*"}).settings.profile
    check_edit(resolution(allowed), HOME, "judge_url", "http://192.168.1.7:8000/v1")
    assert LOCAL.allowed_hosts == []


@pytest.mark.parametrize(
    "value", ["http://127.0.0.1:8001/v1", "http://localhost/", "https://api.openai.com/v1", "8", "1.5", "a: b", 7, None]
)
def test_sec_23_other_values_pass(value: Any) -> None:
    check_edit(resolution(), HOME, "judge_url", value)
    check_value(resolution(), "judge_url", value)
    assert not [host for host in hosts_of(value) if needs_permission(host, []) or is_metadata_service(host)]


def test_sec_23_the_endpoint_of_inference_tests_is_no_metadata_service_either() -> None:
    with pytest.raises(InvalidValueError, match="metadata service"):
        load_settings({"HERMES_HOME": "/nowhere", "HERMES_RL_INFERENCE_BASE_URL": METADATA[0]})


@pytest.mark.parametrize(("field", "value"), [("total_steps", 10**9), ("lora_rank", 500), ("batch_size", 10**6)])
def test_sec_23_more_than_the_operators_ceiling_is_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidValueError, match="ceiling"):
        check_value(resolution(), field, value)


@pytest.mark.parametrize("field", ["checkpoint_dir", "rollout_server_url", "base_url", "api_key"])
def test_sec_23_where_a_run_writes_and_whom_it_asks_is_not_an_agents_choice(field: str) -> None:
    for profile in (LOCAL, HERMES):
        found = resolution(profile)
        if field in found.fields:
            with pytest.raises(LockedFieldError):
                found.editable(field)


@pytest.mark.parametrize("value", ["/etc/cron.d/x", "../../../../.bashrc", "~/.ssh/keys", "/home/u/.hermes-x/a"])
def test_sec_23_groups_are_saved_below_the_home_only(value: str) -> None:
    with pytest.raises(InvalidValueError, match="outside"):
        check_edit(resolution(), HOME, "data_path_to_save_groups", value)
    check_edit(resolution(), HOME, "data_path_to_save_groups", "groups.jsonl")


def test_sec_23_what_is_no_path_is_refused_in_words() -> None:
    with pytest.raises(InvalidValueError, match="no path"):
        check_edit(resolution(), HOME, "data_path_to_save_groups", "groups\0.jsonl")


@pytest.mark.parametrize("text", ["a", "a+", "a.b-"])
def test_sec_23_a_long_value_is_looked_through_for_addresses_in_little_time(text: str) -> None:
    began = time.process_time()
    assert [*hosts_of(text * (200_000 // len(text)) + "http://10.0.0.1/x")] == ["10.0.0.1"]
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "value",
    [
        *("../../../.env", "/home/u/.hermes/.env", "../../session.json", "../0123abcd/checkpoints", "checkpoints/x"),
        *("..", ".", "../any", "saved/../checkpoints"),
    ],
)
def test_sec_23_what_an_environment_saves_is_kept_apart_from_settings_checkpoints_and_other_runs(value: str) -> None:
    for field in ("data_path_to_save_groups", "data_dir_to_save_evals"):
        with pytest.raises(InvalidValueError, match="only this program itself writes"):
            check_edit(resolution(), HOME, field, value)
        for good in ("saved/groups.jsonl", "evals", "/home/u/.hermes/data/groups.jsonl"):
            check_edit(resolution(), HOME, field, good)


def test_sec_02_a_key_is_not_taken_into_a_configuration_but_the_name_of_a_variable_is() -> None:
    for field, value in (("judge_api_key", "hunter2"), ("judge", {"token": "hunter2"}), ("judge", "hf_" + "a" * 30)):
        with pytest.raises(InvalidValueError, match="hermes-rl config set HERMES_RL_SECRET_") as error:
            check_edit(resolution(), HOME, field, value)
        assert "hunter2" not in str(error.value)
    check_edit(resolution(), HOME, "judge_api_key", "$HERMES_RL_SECRET_JUDGE")


def test_address_of_reads_every_spelling_and_no_names() -> None:
    assert str(address_of("0x7f.1")) == "127.0.0.1"
    assert address_of("deadbeef") is None
    assert address_of("") is None


def test_sec_29_hosts_that_are_sent_something_are_named_with_what() -> None:
    values: dict[str, Any] = {
        "run_id": "0123abcd",
        "created_at": "2026-01-01T00:00:00Z",
        "environment": "e",
        "env_file": "/e.py",
        "env_class": "E",
        "env_sha256": "0",
        "profile": "local",
        "base_model": "builtin:tiny",
        "model_path": "m",
        "tokenizer_name": "t",
        "env": {
            "judge_url": "https://judge.example/v1",
            "own": "http://127.0.0.1:8000",
            "text": "see http://other.example",
        },
        "trainer": TrainerConfig(use_wandb=True),
    }
    request = RunRequest.model_validate(values)
    assert receivers(request, {}) == [
        "api.wandb.ai: metrics and settings (use_wandb)",
        "judge.example: what the environment sends there (judge_url)",
        "other.example: what the environment sends there (text)",
    ]
    assert receivers(request, {"WANDB_BASE_URL": "https://wandb.corp.example"})[0].startswith("wandb.corp.example: ")
    quiet = RunRequest.model_validate({**values, "env": {}, "trainer": TrainerConfig()})
    assert receivers(quiet, {}) == []


def test_sec_02_only_the_environments_process_replaces_the_name_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_rl_mcp.envs import BaseEnv

    class JudgeConfig(BaseEnvConfig):
        judge: dict[str, str] | None = None
        api_key: str = ""

    class Judged(BaseEnv):
        @classmethod
        def config_init(cls) -> Any:
            return JudgeConfig(), []

    monkeypatch.setenv("HERMES_RL_SECRET_JUDGE", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    file = tmp_path / "config.yaml"

    def told(**values: Any) -> Any:
        file.write_text(yaml.safe_dump({"env": values}))
        return resolve_options(Judged, parse_flags(["serve", "--config", str(file)])).config

    assert told(api_key="$HERMES_RL_SECRET_JUDGE").api_key == "hunter2"
    assert told(judge={"token": "$HERMES_RL_SECRET_JUDGE"}).judge == {"token": "hunter2"}
    assert told(api_key="$HF_TOKEN").api_key == "$HF_TOKEN", "no other variable can be asked for"
    with pytest.raises(InvalidValueError, match="hermes-rl config set HERMES_RL_SECRET_OTHER"):
        told(api_key="$HERMES_RL_SECRET_OTHER")

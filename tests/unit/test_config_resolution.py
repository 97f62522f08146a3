"""One flat namespace: who decides a value, and which values do not fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.environments import EnvironmentInfo, EnvironmentSchema, FieldInfo
from hermes_rl_mcp.contracts.profiles import HERMES, LOCAL, Profile
from hermes_rl_mcp.errors import InvalidValueError, LockedFieldError, UnknownFieldError
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.checks import check_value, problems
from hermes_rl_mcp.runs.configuration.fields import coerce_library_value
from hermes_rl_mcp.runs.configuration.resolve import Resolution, resolve
from hermes_rl_mcp.runs.request import RunIdentity, build_request

ENV: dict[str, JsonValue] = {
    "group_size": 8,
    "batch_size": 64,
    "total_steps": 60,
    "max_token_length": 256,
    "tokenizer_name": "some/tokenizer",
    "rollout_server_url": "http://localhost:8000",
    "wandb_name": None,
    "use_wandb": True,
    "ensure_scores_are_not_same": True,
    "max_batches_offpolicy": 3,
    "difficulty": 1,
    "data_dir": None,
}
HOME = Home(Path("/home/of/tests"))


def schema(**values: JsonValue) -> EnvironmentSchema:
    fields = [FieldInfo(name=name, type="any", default=value) for name, value in {**ENV, **values}.items()]
    return EnvironmentSchema(name="e", class_name="E", config_class="C", fields=fields, server={"timeout": 77})


def local(edits: dict[str, JsonValue] | None = None, profile: Profile = LOCAL, **values: JsonValue) -> Resolution:
    return resolve(schema(**values), profile, edits or {})


def messages(resolution: Resolution) -> list[str]:
    return [str(problem) for problem in problems(resolution)]


def test_each_source_of_a_value_has_its_place() -> None:
    values = local({"difficulty": 3}).values
    assert values["difficulty"] == 3  # edit
    assert values["group_size"] == 8  # environment
    assert values["max_batches_offpolicy"] == 1  # profile's default over the environment's
    assert values["ensure_scores_are_not_same"] is False  # lock
    assert values["timeout"] == 77  # the environment's own server entry
    assert values["lora_alpha"] == 32.0  # class default


def test_an_environment_may_suggest_trainer_settings_below_edits_and_locks() -> None:
    suggested = schema().model_copy(update={"trainer_defaults": {"learning_rate": 1e-3}})
    assert resolve(suggested, LOCAL, {}).values["learning_rate"] == 1e-3
    assert resolve(suggested, LOCAL, {"learning_rate": 5e-5}).values["learning_rate"] == 5e-5
    assert resolve(suggested, HERMES, {}).values["learning_rate"] == 4e-5


def test_a_field_of_several_sections_is_one_field_whose_value_reaches_all() -> None:
    resolution = local({"use_wandb": True})
    assert resolution.section("env")["use_wandb"] is True
    assert resolution.trainer_config().use_wandb is True


def test_trainer_fields_carry_their_attribute_docstring() -> None:
    assert "Adam step size" in local().fields["learning_rate"].info.description
    assert set(TrainerConfig.model_fields) <= set(local().fields)


def test_locked_and_unknown_fields_are_refused_with_what_a_program_needs() -> None:
    with pytest.raises(LockedFieldError) as locked:
        local().editable("rollout_server_url")
    assert "rollout API" in locked.value.payload["locked_value"]
    with pytest.raises(LockedFieldError) as fixed:
        local(profile=HERMES).editable("total_steps")
    assert fixed.value.payload["locked_value"] == 2500
    with pytest.raises(UnknownFieldError) as unknown:
        local().editable("learning_rat")
    assert "learning_rate" in unknown.value.payload["available_fields"]


def test_an_edit_of_a_field_that_was_locked_later_does_not_beat_the_lock() -> None:
    assert local({"total_steps": 3}, HERMES).values["total_steps"] == 2500


def test_programs_that_an_environment_names_stay_as_its_file_has_them() -> None:
    servers: dict[str, JsonValue] = {"own": {"command": "x"}}
    for profile in (LOCAL, HERMES):
        found = local({"mcp_servers": {"other": {"command": "rm"}}}, profile, mcp_servers=servers)
        assert found.values["mcp_servers"] == servers == found.section("env")["mcp_servers"]
        with pytest.raises(LockedFieldError):
            found.editable("mcp_servers")
    decided = local({}, LOCAL.model_copy(update={"locked": {"mcp_servers": None}}), mcp_servers=servers)
    assert decided.values["mcp_servers"] is None


def test_ceilings_bound_edits_and_defaults() -> None:
    with pytest.raises(InvalidValueError, match="ceiling of 64"):
        check_value(local(), "group_size", 65)
    assert local(max_token_length=999_999).values["max_token_length"] == 16_384


def test_only_models_of_the_allow_list_pass() -> None:
    check_value(local(), "model_name", "Qwen/Qwen3-0.6B")
    with pytest.raises(InvalidValueError) as error:
        check_value(local(), "model_name", "stranger/model")
    assert "builtin:*" in error.value.payload["allowed_models"]


def test_a_model_that_does_not_come_with_the_package_is_refused_with_those_that_do() -> None:
    check_value(local(), "model_name", "builtin:smollm2-135m")
    with pytest.raises(InvalidValueError, match="'builtin:nope' is no model that comes") as error:
        check_value(local(), "model_name", "builtin:nope")
    assert "builtin:tiny, builtin:smollm2-135m" in error.value.hint


@pytest.mark.parametrize(("field", "value"), [("seed", 2**63), ("torch_threads", 1025)])
def test_numbers_that_torch_does_not_take_are_refused_before_a_run(field: str, value: int) -> None:
    assert TrainerConfig.model_validate({field: value - 1})
    with pytest.raises(ValidationError, match="less than"):
        TrainerConfig.model_validate({field: value})


def test_fi_25_a_batch_that_is_no_multiple_of_the_group_names_the_nearest_that_are() -> None:
    [text] = messages(local({"batch_size": 20}))
    assert "batch_size = 20 is not divisible by group_size = 8" in text
    assert "16 or 24" in text


def test_fi_25_a_group_of_one_and_a_batch_below_a_group_are_refused() -> None:
    assert any("gives no signal" in text for text in messages(local({"group_size": 1})))
    assert any("smaller than group_size" in text for text in messages(local({"batch_size": 4})))


def test_answers_longer_than_the_trainer_takes_are_refused() -> None:
    edits: dict[str, JsonValue] = {"max_token_length": 300, "max_token_trainer_length": 200}
    assert any("max_token_trainer_length" in text for text in messages(local(edits)))


@pytest.mark.parametrize(("group", "batch"), [(8, 64), (3, 24), (64, 512), (16, 128)])
def test_an_open_batch_size_becomes_several_whole_groups(group: int, batch: int) -> None:
    resolution = local({"group_size": group}, batch_size=-1)
    assert resolution.values["batch_size"] == batch
    assert messages(resolution) == []


def test_an_open_batch_size_stays_below_the_ceiling() -> None:
    tight = LOCAL.model_copy(update={"ceilings": {"batch_size": 50}})
    assert local({"group_size": 16}, tight, batch_size=-1).values["batch_size"] == 48


@pytest.mark.parametrize("profile", [LOCAL, HERMES])
def test_the_shipped_profiles_let_a_run_start(profile: Profile) -> None:
    assert messages(local(profile=profile)) == []


def test_text_becomes_the_number_it_means_and_nonsense_is_refused() -> None:
    assert coerce_library_value(TrainerConfig, "lora_rank", "8") == 8
    assert coerce_library_value(TrainerConfig, "learning_rate", "1e-4") == 1e-4
    assert coerce_library_value(TrainerConfig, "wandb_group", None) is None
    for name, value in [
        ("lora_rank", "x"),
        ("lora_rank", 0),
        ("learning_rate", "nan"),
        ("device", "tpu"),
        ("seed", 1.5),
    ]:
        with pytest.raises(InvalidValueError, match=name):
            coerce_library_value(TrainerConfig, name, value)


def test_a_locked_secret_is_not_told_to_who_tries_to_change_it() -> None:
    locked = LOCAL.model_copy(update={"locked": {"judge_api_key": "hunter22"}})
    with pytest.raises(LockedFieldError) as caught:
        local(profile=locked, judge_api_key="").editable("judge_api_key")
    assert caught.value.details == {"locked_value": "***"}
    with pytest.raises(LockedFieldError) as caught:
        local().editable("api_key")
    assert caught.value.details == {"locked_value": "set at start"}


def request(resolution: Resolution) -> dict[str, object]:
    info = EnvironmentInfo(name="e", class_name="E", file_path="/e.py", description="", stem="e")
    identity = RunIdentity("0123abcd", "2026-01-01T00:00:00+00:00", "0" * 64, "cpu")
    return build_request(resolution, info, HOME, identity).model_dump()


def test_the_request_loads_builtin_models_from_the_home_and_the_tokenizer_follows() -> None:
    made = request(local())
    assert made["model_path"] == made["tokenizer_name"] == "/home/of/tests/rl/models/tiny"
    assert made["base_model"] == "builtin:tiny"
    assert made["server_type"] == "vllm"
    assert made["server_values"] == {"timeout": 77, "weight": 1.0, "num_requests_for_eval": 256}
    env = made["env"]
    assert isinstance(env, dict)
    assert env["tokenizer_name"] == made["model_path"]
    assert env["wandb_name"] == "e-0123abcd"
    assert "rollout_server_url" not in env  # the launcher's
    assert "data_dir" not in env  # unset


def test_a_wandb_name_that_the_operator_unlocked_counts() -> None:
    managed = {name: text for name, text in LOCAL.managed.items() if name != "wandb_name"}
    env = request(local({"wandb_name": "mine"}, LOCAL.model_copy(update={"managed": managed})))["env"]
    assert isinstance(env, dict) and env["wandb_name"] == "mine"


def test_profile_hermes_keeps_the_original_values() -> None:
    made = request(local(profile=HERMES))
    assert made["tokenizer_name"] == made["model_path"] == "Qwen/Qwen3-8B"
    assert made["server_type"] == "sglang"
    trainer = made["trainer"]
    assert isinstance(trainer, dict)
    assert (trainer["lora_rank"], trainer["learning_rate"], trainer["max_token_trainer_length"]) == (32, 4e-5, 9000)
    assert trainer["wandb_run_name"] == "e-0123abcd"

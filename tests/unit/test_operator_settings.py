"""Flags, variables and the .env file become the operator's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_rl_mcp.contracts.profiles import LOCAL, PROFILES
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations.settings import Flags, load_settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "hermes"
    folder.mkdir()
    return folder


def load(home: Path, flags: Flags = Flags(), **variables: str) -> object:
    return load_settings({"HERMES_HOME": str(home), **variables}, flags)


def test_nothing_set_gives_profile_local_and_no_endpoint(home: Path) -> None:
    settings = load_settings({"HERMES_HOME": str(home)}).settings
    assert settings.profile == LOCAL
    assert (settings.env_dirs, settings.inference, settings.session) == ([], None, "session")


def test_the_env_file_is_read_and_real_variables_win(home: Path) -> None:
    (home / ".env").write_text("WANDB_API_KEY=from-file\nHERMES_RL_PROFILE=hermes\nEMPTY=\nPRICE=$HOME\n")
    (home / ".env").chmod(0o600)
    operator = load_settings({"HERMES_HOME": str(home), "WANDB_API_KEY": "from-process"})
    assert operator.environ["WANDB_API_KEY"] == "from-process"
    assert operator.settings.profile.name == "hermes"
    assert "EMPTY" not in operator.environ
    assert operator.environ["PRICE"] == "$HOME"
    assert "from-process" not in repr(operator)


def test_an_env_file_that_others_can_read_is_warned_about(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / ".env").write_text("A=b\n")
    (home / ".env").chmod(0o644)
    load(home)
    assert "chmod 600" in caplog.text


def test_flags_win_over_variables(home: Path) -> None:
    operator = load_settings(
        {"HERMES_HOME": str(home), "HERMES_RL_PROFILE": "hermes", "HERMES_RL_ENV_DIRS": f"/a{os.pathsep}/b"},
        Flags(profile="local", env_dirs=["/c"], session="mine"),
    )
    assert operator.settings.profile.name == "local"
    assert operator.settings.env_dirs == ["/c"]
    assert operator.home.session_file.name == "mine.json"


def test_several_folders_come_from_one_variable(home: Path) -> None:
    operator = load_settings({"HERMES_HOME": str(home), "HERMES_RL_ENV_DIRS": f"/a{os.pathsep}/b"})
    assert operator.settings.env_dirs == ["/a", "/b"]


def test_fields_can_be_locked_unlocked_and_models_allowed_without_touching_the_shipped_profiles(home: Path) -> None:
    before = {name: profile.model_copy(deep=True) for name, profile in PROFILES.items()}
    profile = load_settings(
        {
            "HERMES_HOME": str(home),
            "HERMES_RL_PROFILE": "hermes",
            "HERMES_RL_UNLOCK": "total_steps, tokenizer_name, docker_image",
            "HERMES_RL_LOCK": "difficulty=2,stop=[1,2],label=a b",
            "HERMES_RL_ALLOW_MODELS": "me/*,/data/models/*",
        }
    ).settings.profile
    assert "total_steps" not in profile.locked
    assert "docker_image" not in profile.locked_names() and "mcp_servers" in profile.locked_names()
    assert profile.defaults["total_steps"] == 2500
    assert (profile.locked["difficulty"], profile.locked["stop"], profile.locked["label"]) == (2, [1, 2], "a b")
    assert {"me/*", "/data/models/*"} <= set(profile.allowed_models)
    assert before == PROFILES


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"HERMES_RL_PROFILE": "x"}, "hermes, local"),
        ({"HERMES_RL_UNLOCK": "base_url"}, "cannot be unlocked"),
        ({"HERMES_RL_UNLOCK": "lora_rank"}, "does not lock"),
        ({"HERMES_RL_LOCK": "api_key=x"}, "set by the launcher"),
        ({"HERMES_RL_LOCK": "total_steps"}, "NAME=VALUE"),
        ({"HERMES_RL_SESSION": "../up"}, "file name"),
        ({"HERMES_RL_INFERENCE_BASE_URL": "http://h/v1"}, "HERMES_RL_INFERENCE_MODEL"),
        ({"HERMES_RL_INFERENCE_BASE_URL": "file:///x", "HERMES_RL_INFERENCE_MODEL": "m"}, "not an http"),
    ],
)
def test_what_makes_no_sense_is_an_error_that_says_so(home: Path, variables: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidValueError, match=says):
        load(home, **variables)


def test_the_endpoint_names_the_variable_of_its_key_and_not_the_key(home: Path) -> None:
    variables = {"HERMES_RL_INFERENCE_BASE_URL": "https://h/v1/", "HERMES_RL_INFERENCE_MODEL": "m"}
    with_key = {**variables, "HERMES_HOME": str(home), "HERMES_RL_INFERENCE_API_KEY": "hidden-key"}
    endpoint = load_settings(with_key).settings.inference
    assert endpoint is not None
    assert (endpoint.base_url, endpoint.api_key_variable) == ("https://h/v1", "HERMES_RL_INFERENCE_API_KEY")
    assert "hidden-key" not in endpoint.model_dump_json()
    other = load_settings({**variables, "HERMES_HOME": str(home)}).settings.inference
    assert other is not None
    assert other.api_key_variable == "OPENAI_API_KEY"


def test_ceilings_come_from_flags_and_variables_and_anything_but_a_positive_number_is_refused() -> None:
    def limits(environ: dict[str, str], **flags: str) -> dict[str, float]:
        found = load_settings({"HERMES_HOME": "/none", **environ}, Flags(**flags)).settings.limits
        return found.model_dump(exclude_none=True)

    assert limits({}) == {}
    environ = {"HERMES_RL_MAX_HOURS": "2.5", "HERMES_RL_MAX_DISK_GIB": "10"}
    assert limits(environ, max_hours="1", max_gpu_memory_gib="8") == {
        **{"max_hours": 1.0, "max_disk_gib": 10.0, "max_gpu_memory_gib": 8.0},
    }
    for text in ("0", "-1", "nan", "inf", "many"):
        with pytest.raises(InvalidValueError, match="HERMES_RL_MAX_HOURS"):
            limits({"HERMES_RL_MAX_HOURS": text})

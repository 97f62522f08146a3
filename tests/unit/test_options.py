"""Each option is a flag, a variable and a key of the settings file, and the first of the three that is given counts."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations.options import OPTIONS, Flags, Given, Option
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.server.flags import flags_of, parser, serving

TOKEN = "0123456789abcdef-token"
EXAMPLES: dict[str, tuple[str, Any]] = {
    # name: text for the flag and the variable, value in the file
    "config": ("FILE", None),
    "profile": ("hermes", "hermes"),
    "env_dirs": ("/envs", ["/envs"]),
    "data_dirs": ("/data", ["/data"]),
    "atropos_python": (sys.executable, sys.executable),
    "session": ("mine", "mine"),
    "lock": ("stop=[1, 2]", {"stop": [1, 2]}),
    "unlock": ("tokenizer_name", ["tokenizer_name"]),
    "allow_models": ("me/*", ["me/*"]),
    "max_hours": ("2.5", 2.5),
    "max_disk_gib": ("10", 10),
    "max_gpu_memory_gib": ("8", "8"),
    "ask_hours": ("1", 1),
    "ask_disk_gib": ("2", 2),
    "ask_gpu_memory_gib": ("3", 3),
    "read_only": ("1", True),
    "tools": ("rl_list_runs,rl_get_results", ["rl_list_runs", "rl_get_results"]),
    "exclude_tools": ("rl_stop_training", "rl_stop_training"),
    "transport": ("sse", "sse"),
    "host": ("localhost", "localhost"),
    "port": ("1234", 1234),
    "token_file": ("TOKEN", "TOKEN"),
    "accept_hosts": ("gpu.example,gpu:80", ["gpu.example", "gpu:80"]),
    "accept_origins": ("https://lab.example", ["https://lab.example"]),
    "log_file": ("/logs/server.log", "/logs/server.log"),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rl").mkdir()
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    return tmp_path


def understood(home: Path, arguments: list[str] | None = None, **variables: str) -> dict[str, Any]:
    """All that the server makes of a command line, variables and the files of its home."""
    operator = load_settings({"HERMES_HOME": str(home), **variables}, flags_of(parser().parse_args(arguments or [])))
    how = serving(operator.given)
    return {**operator.settings.model_dump(), **vars(how)}


def test_flags_have_one_field_for_each_option_and_no_two_options_share_a_name() -> None:
    assert [field.name for field in fields(Flags)] == [option.name for option in OPTIONS] == list(EXAMPLES)
    assert len({option.flag_name for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.in_file], ids=lambda option: option.name)
def test_flag_variable_and_key_mean_the_same(home: Path, option: Option) -> None:
    text, value = EXAMPLES[option.name]
    if option.name == "token_file":
        text = value = str(home / "token")
    with_http = {} if option.name == "transport" else {"HERMES_RL_TRANSPORT": "sse"}
    nothing = understood(home, **with_http)
    by_flag = understood(home, [option.flag_name, *([] if option.switch else [text])], **with_http)
    assert by_flag != nothing
    assert understood(home, **with_http, **{option.variable: text}) == by_flag
    (home / ".env").write_text(f"{option.variable}={text}\n")
    assert understood(home, **with_http) == by_flag
    (home / ".env").unlink()
    (home / "rl" / "server.yaml").write_text(yaml.safe_dump({option.name: value}))
    assert understood(home, **with_http) == by_flag
    (home / "rl" / "server.yaml").rename(home / "mine.yaml")
    assert understood(home, **with_http) == nothing
    assert understood(home, ["--config", str(home / "mine.yaml")], **with_http) == by_flag
    assert understood(home, **with_http, HERMES_RL_CONFIG=str(home / "mine.yaml")) == by_flag


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(home: Path) -> None:
    (home / "rl" / "server.yaml").write_text("{session: file, env_dirs: [/file], read_only: true}")
    (home / ".env").write_text("HERMES_RL_PORT=1\nHERMES_RL_SESSION=dotenv\n")
    assert (understood(home)["session"], understood(home)["port"]) == ("dotenv", 1)
    found = understood(home, ["--env-dir", "/flag"], HERMES_RL_SESSION="variable", HERMES_RL_ENV_DIRS="/variable")
    assert (found["session"], found["env_dirs"], found["read_only"]) == ("variable", ["/flag"], True)
    assert understood(home, HERMES_RL_READ_ONLY="0")["read_only"] is False
    assert understood(home, ["--read-only"], HERMES_RL_READ_ONLY="no")["read_only"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_hour: 3", "no setting 'max_hour'"),
        ("config: x", "no setting 'config'"),
        ("token: x", "no setting 'token'"),
        ("read_only: maybe", "true or false"),
        ("port: [1]", "one value"),
        ("port: true", "one value"),
        ("env_dirs: [1]", "list of texts"),
        ("- a", "not a list of settings"),
        ("a: [", "not YAML"),
        ("tools: []", "empty list"),
        ("read_only: true\nread_only: false", "'read_only' stands there twice"),
        ("max_hours: -1", "not a number above 0"),
    ],
)
def test_a_line_of_the_settings_file_that_makes_no_sense_is_an_error(home: Path, text: str, says: str) -> None:
    (home / "rl" / "server.yaml").write_text(text)
    with pytest.raises(InvalidValueError, match=says):
        understood(home)


def test_an_empty_settings_file_says_nothing_and_a_named_one_must_exist(home: Path) -> None:
    nothing = understood(home)
    (home / "rl" / "server.yaml").write_text("# nothing yet\nsession:\n")
    assert understood(home) == nothing
    with pytest.raises(InvalidValueError, match="does not exist"):
        understood(home, ["--config", str(home / "none.yaml")])
    with pytest.raises(InvalidValueError, match="neither yes nor no"):
        understood(home, HERMES_RL_READ_ONLY="perhaps")


def how(home: Path, *arguments: str, **variables: str) -> Any:
    operator = load_settings({"HERMES_HOME": str(home), **variables}, flags_of(parser().parse_args(arguments)))
    return serving(operator.given)


def test_the_token_of_the_flag_wins_then_the_variables_own_then_that_of_the_file(home: Path) -> None:
    http = ("--transport", "sse")
    file = str(home / "token")
    assert how(home, *http).token is None
    assert how(home, *http, HERMES_RL_TOKEN="a-token-of-the-variable").token == "a-token-of-the-variable"
    assert how(home, *http, HERMES_RL_TOKEN_FILE=file).token == TOKEN
    both = how(home, *http, HERMES_RL_TOKEN="a-token-of-the-variable", HERMES_RL_TOKEN_FILE=file)
    assert both.token == "a-token-of-the-variable"
    assert how(home, *http, "--token-file", file, HERMES_RL_TOKEN="a-token-of-the-variable").token == TOKEN
    assert TOKEN not in repr(how(home, *http, "--token-file", file))
    assert how(home, HERMES_RL_TOKEN="short").token is None, "over stdio there is nobody to ask for it"


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [("short", 0o600, "at least 16"), ("two words are no token", 0o600, "without blanks"), (TOKEN, 0o644, "chmod 600")],
)
def test_a_token_that_is_weak_or_can_be_read_by_others_is_refused(home: Path, text: str, mode: int, says: str) -> None:
    (home / "token").write_text(text)
    (home / "token").chmod(mode)
    with pytest.raises(InvalidValueError, match=says) as caught:
        how(home, "--transport", "sse", "--token-file", str(home / "token"))
    assert text not in str(caught.value)
    with pytest.raises(InvalidValueError, match="cannot be read"):
        how(home, "--transport", "sse", "--token-file", str(home / "none"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "gpu.example", "127.0.0.1.evil.example", ""])
def test_sec_09_an_address_that_others_reach_needs_a_token(home: Path, host: str) -> None:
    flags = ("--transport", "streamable-http", "--host", host)
    if not host:
        assert how(home, *flags).host == "127.0.0.1", "not given"
        return
    with pytest.raises(InvalidValueError, match="there is no token"):
        how(home, *flags)
    assert how(home, *flags, HERMES_RL_TOKEN=TOKEN).host == host


def test_a_repeated_flag_of_names_may_hold_several_but_a_lock_keeps_its_commas() -> None:
    given = Given(Flags(tools=["a, b", "c"], lock=["stop=[1,2]"]), {})
    assert given.texts("tools") == ["a", "b", "c"]
    assert given.texts("lock") == ["stop=[1,2]"]


def test_a_flag_of_names_that_holds_none_is_an_error_and_not_everything() -> None:
    with pytest.raises(InvalidValueError, match="--tools is empty"):
        Given(Flags(tools=["", " , "]), {}).texts("tools")

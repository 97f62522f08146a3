"""Keys and settings in ``.env``: written whole, private, and never shown."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.cli import config, config_commands
from hermes_rl_mcp.errors import InvalidValueError, NotFoundError


def test_a_key_is_written_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "home" / ".env"
    config.set_value(file, "WANDB_API_KEY", 'it\'s a "key" with \\ and ${HOME} # and spaces')
    assert config.values(file) == {"WANDB_API_KEY": 'it\'s a "key" with \\ and ${HOME} # and spaces'}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_by_the_next_write(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("# mine\nA=1\n")
    file.chmod(0o644)
    config.set_value(file, "B", "2")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "# mine\nA=1\nB='2'\n"


def test_setting_twice_keeps_one_line_and_unset_takes_it_out(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    config.set_value(file, "A", "1")
    config.set_value(file, "A", "2")
    assert config.values(file) == {"A": "2"}
    config.unset_value(file, "A")
    assert config.values(file) == {}
    with pytest.raises(NotFoundError, match="A is not in"):
        config.unset_value(file, "A")


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\nB", "$A"])
def test_what_is_no_variable_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match="not a variable name"):
        config.set_value(tmp_path / ".env", name, "x")
    assert not (tmp_path / ".env").exists()


@pytest.mark.parametrize("value", ["", "a\nb", "a\0b"])
def test_a_value_that_is_no_line_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(InvalidValueError):
        config.set_value(tmp_path / ".env", "A", value)
    assert not (tmp_path / ".env").exists()


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf"])
def test_a_ceiling_that_no_server_would_start_with_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HERMES_HOME", str(tmp_path))
    with pytest.raises(InvalidValueError, match=r"HERMES_RL_MAX_HOURS.*not a number above 0"):
        config_commands.config_set("HERMES_RL_MAX_HOURS", value)
    assert not (tmp_path / ".env").exists()
    config_commands.config_set("HERMES_RL_MAX_HOURS", "8")
    assert config.values(tmp_path / ".env") == {"HERMES_RL_MAX_HOURS": "8"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("WANDB_API_KEY", "set (not shown)"),
        ("SOMETHING", "set (not shown)"),
        ("HERMES_RL_HTTP_TOKEN", "set (not shown)"),
        ("HERMES_RL_PROFILE", "v"),
        ("HF_HOME", "v"),
    ],
)
def test_only_names_known_to_be_settings_show_their_value(name: str, shown: str) -> None:
    assert config.show(name, "v") == shown


_WRITER = """
import sys, pathlib
from hermes_rl_mcp.cli import config
config.set_value(pathlib.Path(sys.argv[1]), sys.argv[2], "x")
"""


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(file), f"K{i}"]) for i in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert set(config.values(file)) == {"K0", "K1", "K2", "K3"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".env-")] == []

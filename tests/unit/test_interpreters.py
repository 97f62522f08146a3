"""Which Python runs an environment written for Atropos."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.interpreters import ATROPOS_PYTHON, environment_program
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.operations.settings import load_settings

OWN = [sys.executable, "-P", "-m", "hermes_rl_mcp.envs"]


def made(home: Path) -> Path:
    python = home / "rl" / "atropos-venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (home / "rl" / "atropos-venv" / "installed.txt").touch()
    return python


def test_our_own_environments_run_with_our_own_python_whatever_is_set(tmp_path: Path) -> None:
    made(tmp_path)
    assert environment_program("hermes_rl_mcp", {"HERMES_HOME": str(tmp_path)}) == OWN


def test_without_a_python_for_atropos_its_environments_run_with_ours(tmp_path: Path) -> None:
    assert environment_program("atroposlib", {"HERMES_HOME": str(tmp_path)}) == OWN


def test_an_installed_python_for_atropos_is_found_and_a_named_one_wins(tmp_path: Path) -> None:
    environ = {"HERMES_HOME": str(tmp_path)}
    python = made(tmp_path)
    program = environment_program("atroposlib", environ)
    assert program[:2] == [str(python), "-P"]
    assert Path(program[2]).name == "bootstrap.py" and Path(program[2]).is_file()
    assert environment_program("atroposlib", {**environ, ATROPOS_PYTHON: sys.executable})[0] == sys.executable


def test_an_installation_that_was_ended_is_said_to_be_and_not_used(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "rl" / "atropos-venv" / "installed.txt").unlink()
    with pytest.raises(InvalidValueError, match="was not finished") as refused:
        environment_program("atroposlib", {"HERMES_HOME": str(tmp_path)})
    assert refused.value.hint == "Run: hermes-rl install-atropos"


def test_a_named_python_that_is_not_there_is_refused_when_the_server_starts(tmp_path: Path) -> None:
    environ = {"HERMES_HOME": str(tmp_path)}
    with pytest.raises(InvalidValueError, match="is no file"):
        environment_program("atroposlib", {**environ, ATROPOS_PYTHON: str(tmp_path / "gone")})
    with pytest.raises(InvalidValueError, match="is no file"):
        load_settings(environ, Flags(atropos_python=str(tmp_path / "gone")))


def test_a_python_that_is_named_by_flag_is_what_children_are_told(tmp_path: Path) -> None:
    operator = load_settings({"HERMES_HOME": str(tmp_path)}, Flags(atropos_python=sys.executable))
    assert environment_program("atroposlib", operator.environ)[0] == sys.executable

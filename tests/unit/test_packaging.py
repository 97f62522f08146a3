"""What the package says of itself agrees everywhere: versions, commands, pins."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hermes_rl_mcp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in (
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
}


def test_the_installed_version_is_that_of_the_source() -> None:
    assert importlib.metadata.version("hermes-rl-mcp") == hermes_rl_mcp.__version__


def test_installed_commands_are_those_of_the_project_and_can_be_called() -> None:
    installed = importlib.metadata.distribution("hermes-rl-mcp").entry_points
    commands = {entry.name: entry.value for entry in installed if entry.group == "console_scripts"}
    assert commands == PROJECT["scripts"]
    for target in commands.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def _requirements() -> list[Requirement]:
    extras = ("train", "wandb", "dev", "bench")
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for lines in lists for line in lines]


@pytest.mark.parametrize("requirement", _requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_to_a_version_that_the_project_allows(requirement: Requirement) -> None:
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


def test_tests_run_on_the_pinned_versions() -> None:
    for name in ("mcp", "pydantic", "torch", "transformers", "peft"):
        assert Version(importlib.metadata.version(name)).public == PINS[canonicalize_name(name)].public


def test_the_container_and_the_makefile_install_the_pinned_torch() -> None:
    torch = f"torch=={PINS[canonicalize_name('torch')]}"
    for file in ("Makefile", "Containerfile"):
        assert set(re.findall(r"torch==\d[\d.]*\d", (ROOT / file).read_text())) == {torch}


def test_ci_runs_both_parts_of_the_suite() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make")] == ["make test", "make test-more"]

"""How the product is given away: one version everywhere, a registry entry and a bundle that say what is so."""

from __future__ import annotations

import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hermes_rl_mcp import __version__, tools
from hermes_rl_mcp.operations.options import OPTIONS
from hermes_rl_mcp.paths import install_root

ROOT = Path(__file__).parents[2]
REGISTRY = json.loads((ROOT / "server.json").read_text())
MANIFEST = json.loads((ROOT / "bundle" / "manifest.json").read_text())
BUNDLE = runpy.run_path(str(ROOT / "bundle" / "make.py"))

_TEXT = {"type": "string", "minLength": 1}
_INPUT = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][A-Z0-9_]*$"},
        "description": _TEXT,
        "format": {"enum": ["string", "number", "boolean", "filepath"]},
        "default": {"type": "string"},
        "isRequired": {"type": "boolean"},
        "isSecret": {"type": "boolean"},
    },
}
REGISTRY_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["$schema", "name", "description", "version", "packages"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"const": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json"},
        "name": {"type": "string", "pattern": r"^[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+$", "minLength": 3, "maxLength": 200},
        "title": {**_TEXT, "maxLength": 100},
        "description": {**_TEXT, "maxLength": 100},
        "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "packages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["registryType", "identifier", "version", "transport"],
                "additionalProperties": False,
                "properties": {
                    "registryType": {"enum": ["pypi"]},
                    "identifier": _TEXT,
                    "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                    "runtimeHint": {"enum": ["uvx"]},
                    "transport": {
                        "type": "object",
                        "required": ["type"],
                        "additionalProperties": False,
                        "properties": {"type": {"enum": ["stdio"]}},
                    },
                    "environmentVariables": {"type": "array", "items": _INPUT},
                },
            },
        },
    },
}
"""What of the registry's schema of 2025-12-11 we use; stricter, as nothing else may come in by mistake."""


def test_the_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert REGISTRY["version"] == __version__
    assert [package["version"] for package in REGISTRY["packages"]] == [__version__]
    assert MANIFEST["version"] == __version__
    assert BUNDLE["version"]() == __version__
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"hermes-rl-mcp[ -](\d+\.\d+\.\d+)", readme)) == {__version__}


def test_the_registry_entry_fits_the_registrys_schema_and_belongs_to_the_package() -> None:
    jsonschema.Draft202012Validator(REGISTRY_SCHEMA).validate(REGISTRY)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [package] = REGISTRY["packages"]
    assert package["identifier"] == project["name"]
    assert package["identifier"] in project["scripts"]  # uvx calls the command of the package's name
    assert f"<!-- mcp-name: {REGISTRY['name']} -->" in (ROOT / "README.md").read_text()
    known = {option.variable for option in OPTIONS} | {"HERMES_HOME", "HF_TOKEN", "WANDB_API_KEY"}
    assert {variable["name"] for variable in package["environmentVariables"]} <= known
    secret = {one["name"] for one in package["environmentVariables"] if one.get("isSecret")}
    assert secret == {"HF_TOKEN", "WANDB_API_KEY"}


def test_the_manifest_lists_the_tools_and_passes_on_what_the_person_chose() -> None:
    assert MANIFEST["manifest_version"] == "0.4"
    assert {tool["name"] for tool in MANIFEST["tools"]} == set(tools.__all__)
    server = MANIFEST["server"]
    assert (server["type"], server["entry_point"]) == ("uv", "server/main.py")
    environ = server["mcp_config"]["env"]
    assert {f"${{user_config.{name}}}" for name in MANIFEST["user_config"]} == set(environ.values())
    assert all("default" in one for one in MANIFEST["user_config"].values())
    known = {option.variable for option in OPTIONS} | {"HERMES_HOME", "HERMES_RL_BUNDLE_PYTHON"}
    assert set(environ) <= known


def test_a_bundle_holds_the_packages_their_dependencies_and_nothing_of_the_workshop(tmp_path: Path) -> None:
    BUNDLE["stage"](tmp_path / "bundle")
    files = {str(path.relative_to(tmp_path / "bundle")) for path in (tmp_path / "bundle").rglob("*") if path.is_file()}
    assert {"manifest.json", "pyproject.toml", "README.md", "LICENSE", MANIFEST["server"]["entry_point"]} <= files
    top = {name.split("/")[0] for name in files if "/" in name}
    assert top == {"hermes_rl_mcp", "trainer", "environments", "server"}
    assert not [name for name in files if name.endswith(".pyc") or "test" in name.split("/")]
    for name in ("hermes_rl_mcp/server/__main__.py", "environments/arithmetic.py", "trainer/__main__.py"):
        assert (tmp_path / "bundle" / name).read_bytes() == (install_root() / name).read_bytes()
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    staged = tomllib.loads((tmp_path / "bundle" / "pyproject.toml").read_text())
    assert staged["project"]["dependencies"] == ours["dependencies"]
    assert staged["project"]["scripts"] == ours["scripts"]
    assert staged["project"]["version"] == __version__
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert staged["tool"]["uv"]["constraint-dependencies"] == pins


@pytest.mark.parametrize("left", ["", "${user_config.python}"])
def test_what_a_person_left_empty_in_the_bundles_settings_is_not_passed_on(
    monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    launched: list[Any] = []
    launcher = runpy.run_path(str(ROOT / "bundle" / "launcher.py"))
    for name in ("HERMES_RL_ENV_DIRS", "HERMES_RL_BUNDLE_PYTHON"):
        monkeypatch.setenv(name, left)
    monkeypatch.setenv("HERMES_HOME", "/h")
    monkeypatch.setattr("hermes_rl_mcp.server.__main__.main", lambda flags: launched.append((flags, _ours())))
    launcher["main"]()
    assert launched == [(["--transport", "stdio"], {"HERMES_HOME": "/h"})]


def test_a_bundle_starts_the_server_of_the_python_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    launcher = runpy.run_path(str(ROOT / "bundle" / "launcher.py"))
    monkeypatch.setenv("HERMES_RL_BUNDLE_PYTHON", sys.executable)
    monkeypatch.setattr("os.execv", lambda path, argv: launched.append((path, argv)))
    monkeypatch.setattr("hermes_rl_mcp.server.__main__.main", lambda flags: None)
    launcher["main"]()
    arguments = ["-P", "-m", "hermes_rl_mcp.server", "--transport", "stdio"]
    assert launched == [(sys.executable, [sys.executable, *arguments])]


def _ours() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name.startswith("HERMES_") and "TEST" not in name}

"""``hermes-rl config CLIENT`` as a person calls it, and a client that starts what it wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from mcp import Client, StdioServerParameters
from test_cli_commands import hermes_rl

from hermes_rl_mcp import __version__


@pytest.fixture
def user(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """With a home of its own."""
    (tmp_path / "user").mkdir()
    kept = {name: value for name, value in environ.items() if name != "XDG_CONFIG_HOME"}
    return {**kept, "HOME": str(tmp_path / "user")}


def test_the_entry_alone_goes_to_stdout_and_nothing_is_written(user: dict[str, str]) -> None:
    done = hermes_rl({**user, "HF_TOKEN": "hf_aaaaaaaaaaaaaaaaaaaaaaaa"}, "config", "cursor", "--", "--read-only")
    assert done.returncode == 0
    [entry] = json.loads(done.stdout)["mcpServers"].values()
    assert entry["args"] == ["--transport", "stdio", "--read-only"]
    assert entry["env"]["HERMES_HOME"] == user["HERMES_HOME"]
    assert str(Path(user["HOME"], ".cursor", "mcp.json")) in done.stderr
    assert "hermes-rl config set HF_TOKEN -" in done.stderr
    assert "hf_aaaa" not in done.stdout + done.stderr
    assert os.listdir(user["HOME"]) == []


def test_keys_of_the_server_and_entries_of_clients_are_set_side_by_side(user: dict[str, str]) -> None:
    home = Path(user["HERMES_HOME"])
    assert hermes_rl(user, "config", "set", "WANDB_API_KEY", "-", stdin="s3cr3t-value\n").returncode == 0
    (home / "config.yaml").write_text("model: x  # mine\n")
    done = hermes_rl(user, "config", "hermes", "--write")
    assert done.returncode == 0, done.stderr
    text = (home / "config.yaml").read_text()
    assert text.startswith("model: x  # mine\n")
    assert list(yaml.safe_load(text)["mcp_servers"]) == ["hermes-rl"]
    [backup] = home.glob("config.yaml.*.bak")
    assert str(backup) in done.stdout
    assert "s3cr3t" not in text + done.stdout
    assert hermes_rl(user, "config", "get", "WANDB_API_KEY").stdout == "set (not shown)\n"
    assert "nothing was changed" in hermes_rl(user, "config", "hermes", "--write").stdout


def test_a_broken_file_is_an_error_with_a_way_out(user: dict[str, str]) -> None:
    file = Path(user["HOME"], ".claude.json")
    file.write_text('{"projects": {')
    done = hermes_rl(user, "config", "claude-code", "--write")
    assert done.returncode == 1
    assert "Error:" in done.stderr
    assert "line 1, column 15" in done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_text() == '{"projects": {'


@pytest.mark.anyio
async def test_a_client_starts_the_server_from_what_was_written(user: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "project" / ".mcp.json"
    done = hermes_rl(user, "config", "claude-code", "--write", "--file", str(file), "--name", "mine")
    assert done.returncode == 0, done.stderr
    entry = json.loads(file.read_text())["mcpServers"]["mine"]
    environ = {"HERMES_RL_TEST_MARK": user["HERMES_RL_TEST_MARK"], **entry["env"]}
    server = StdioServerParameters(command=entry["command"], args=entry["args"], env=environ, cwd=tmp_path)
    async with Client(server, read_timeout_seconds=90) as client:
        assert client.server_info.version == __version__
        assert len((await client.list_tools()).tools) == 10

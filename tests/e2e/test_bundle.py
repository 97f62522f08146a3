"""The bundle as the official tool packs it, unpacked and started as a host would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters

from hermes_rl_mcp import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    """What the official tool validated and packed, as a host has it after the installation."""
    if shutil.which("npm") is None:
        pytest.skip("no npm, which brings the tool that packs bundles")
    made = subprocess.run(
        ["make", "bundle", f"BUNDLE_DIR={tmp_path}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "Manifest schema validation passes!" in made.stdout
    with zipfile.ZipFile(tmp_path / f"hermes-rl-mcp-{__version__}.mcpb") as packed:
        packed.extractall(tmp_path / "unpacked")
    assert not list((tmp_path / "unpacked").rglob("tests"))
    return tmp_path / "unpacked"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.anyio
async def test_a_bundle_that_the_official_tool_packed_serves_the_tools(environ: dict[str, str], unpacked: Path) -> None:
    # What uv would install is here already; the code must be the bundle's own.
    variables = {**environ, "PYTHONPATH": str(unpacked), "HERMES_RL_ENV_DIRS": "${user_config.environments}"}
    server = StdioServerParameters(
        command=sys.executable, args=[str(unpacked / "server" / "main.py")], env=variables, cwd=os.sep
    )
    async with Client(server, read_timeout_seconds=90) as client:
        assert client.server_info.version == __version__
        assert len((await client.list_tools()).tools) == 10
        listed = await client.call_tool("rl_list_environments", {})
        assert str(unpacked / "environments" / "arithmetic.py") in str(listed.structured_content)

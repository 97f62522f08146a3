"""The server's and the supervisor's processes stay light (import layers themselves are checked by ``make lint``)."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "wandb", "datasets", "tinker", "numpy", "atroposlib", "math_verify")


def loaded_by(code: str, environ: dict[str, str]) -> set[str]:
    """Top-level packages in ``sys.modules`` after ``code``."""
    report = "\nimport sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code + report],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


USE_THE_SERVER = """
import anyio, os
from mcp import Client
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server.app import build_server
import hermes_rl_mcp.server.__main__, hermes_rl_mcp.tools, hermes_rl_mcp.cli.main
async def use():
    async with Client(build_server(Operations.from_environ(os.environ))) as client:
        for tool, arguments in (
            ("rl_list_environments", {}),
            ("rl_list_environments", {"dataset": "gsm8k_sample"}),
            ("rl_select_environment", {"name": "arithmetic"}),
            ("rl_get_current_config", {}),
            ("rl_edit_config", {"field": "batch_size", "value": 9}),
            ("rl_edit_config", {"field": "lora_rank", "value": 8}),
            ("rl_list_runs", {}),
        ):
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer.content
        assert (await client.call_tool("rl_start_training", {})).is_error
        await client.list_resources()
anyio.run(use)
"""


def test_a_server_that_was_used_has_loaded_nothing_heavy(environ: dict[str, str]) -> None:
    loaded = loaded_by(USE_THE_SERVER, environ)
    assert "mcp" in loaded
    assert loaded.isdisjoint(HEAVY), loaded.intersection(HEAVY)


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("hermes_rl_mcp.runs.supervisor", (*HEAVY, "mcp")),
        ("hermes_rl_mcp.rollout_api.__main__", (*HEAVY, "mcp")),
        ("hermes_rl_mcp.operations.inference_runner", (*HEAVY, "mcp")),
        ("hermes_rl_mcp.cli.dashboard", (*HEAVY, "mcp")),
        ("hermes_rl_mcp.contracts.results", (*HEAVY, "mcp", "yaml", "psutil", "httpx")),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, banned: tuple[str, ...], environ: dict[str, str]) -> None:
    loaded = loaded_by(f"import {module}", environ)
    assert loaded.isdisjoint(banned), loaded.intersection(banned)

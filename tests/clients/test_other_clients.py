"""Clients that our tests' environment does not have: the SDK's 1.x and FastMCP's, each in a virtual environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_rig import TRANSPORTS, drive, interpreter, served_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("library", ["mcp1", "fastmcp"])
def test_another_client_finds_everything_and_trains(
    environ: dict[str, str], tmp_path: Path, library: str, transport: str
) -> None:
    python = interpreter(library)
    if not python.exists():
        pytest.skip("make clients makes the virtual environments of other clients")
    with served_over(transport, environ, tmp_path / "server.log") as target:
        seen = drive(python, library, "legacy", "glance", target, 120)
        assert seen["prompts"]
        trained = drive(python, library, "legacy", "whole", target, 500)
    assert trained["steps"] >= 2

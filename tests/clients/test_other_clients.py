"""Clients that our tests' environment does not have: the SDK's 1.x and FastMCP's, each in a virtual environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_rig import TRANSPORTS, at, drive, interpreter, served_over
from served import product
from wire import ERA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


CLIENTS = [("mcp1", "legacy"), ("fastmcp", "modern"), ("fastmcp", "legacy")]
"""FastMCP's finds the newer era by itself, and over SSE looks for none."""
WHOLE = [("mcp1", "legacy", "stdio"), ("fastmcp", "modern", "streamable-http"), ("fastmcp", "modern", "sse")]
"""Who trains as well: each library and each transport; a run takes most of a minute."""


def revision(library: str, era: str, transport: str) -> str:
    return ERA["legacy" if (library, transport) == ("fastmcp", "sse") else era]


def python_with(library: str) -> Path:
    python = interpreter(library)
    if not python.exists():
        pytest.skip("make clients makes the virtual environments of other clients")
    return python


@pytest.fixture(scope="module")
def address(module_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with product(module_environ, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("library", "era"), CLIENTS)
def test_another_client_finds_everything_over_each_transport(
    module_environ: dict[str, str], address: str, library: str, era: str, transport: str
) -> None:
    seen = drive(python_with(library), library, era, "glance", at(transport, address, module_environ), 250)
    assert seen["revision"] == revision(library, era, transport)


@pytest.mark.parametrize(("library", "era", "transport"), WHOLE)
def test_another_client_trains_from_selection_to_results(
    environ: dict[str, str], tmp_path: Path, library: str, era: str, transport: str
) -> None:
    python = python_with(library)
    with served_over(transport, environ, tmp_path / "server.log") as target:
        seen = drive(python, library, era, "whole", target, 500)
    assert seen["revision"] == revision(library, era, transport)

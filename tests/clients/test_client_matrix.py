"""The SDK's client of today, in both eras of the protocol and over the three transports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from client_rig import TRANSPORTS, at, served_over
from scenario import SCENARIOS
from served import product
from wire import ERA
from with_mcp2 import connect

WHOLE = (("stdio", "modern"), ("streamable-http", "legacy"), ("sse", "modern"))
"""Who trains as well: each transport and each era; a run takes most of a minute."""

# How clients up to 2025-11-25 subscribe.
pytestmark = pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed:mcp.MCPDeprecationWarning")


@pytest.fixture(scope="module")
def address(module_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server for clients of both kinds of HTTP."""
    with product(module_environ, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_of_either_era_finds_everything_over_each_transport(
    module_environ: dict[str, str], address: str, transport: str, era: str
) -> None:
    async with connect(at(transport, address, module_environ), era) as wire:
        seen = await SCENARIOS["glance"](wire)
    assert seen["revision"] == ERA[era]


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("transport", "era"), WHOLE)
async def test_a_client_of_either_era_trains_from_selection_to_results(
    environ: dict[str, str], tmp_path: Path, transport: str, era: str
) -> None:
    with served_over(transport, environ, tmp_path / "server.log") as target:
        async with connect(target, era) as wire:
            seen = await SCENARIOS["whole"](wire)
    assert seen["revision"] == ERA[era]

"""The SDK's client of today, in both eras of the protocol and over the three transports."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_rig import TRANSPORTS, served_over
from scenario import SCENARIOS
from wire import ERA
from with_mcp2 import connect


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_of_either_era_finds_everything_over_each_transport(
    environ: dict[str, str], tmp_path: Path, transport: str, era: str
) -> None:
    with served_over(transport, environ, tmp_path / "server.log") as target:
        async with connect(target, era) as wire:
            seen = await SCENARIOS["glance"](wire)
    assert seen["revision"] == ERA[era]


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(600)
@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_of_either_era_trains_from_selection_to_results(
    environ: dict[str, str], tmp_path: Path, transport: str, era: str
) -> None:
    with served_over(transport, environ, tmp_path / "server.log") as target:
        async with connect(target, era) as wire:
            seen = await SCENARIOS["whole"](wire)
    assert seen["revision"] == ERA[era]

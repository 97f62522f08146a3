"""Parts included in rl_check_status tell nothing that the limit on fresh metrics holds back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import LIMIT_S, RUN_ID, LiveRun

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.contracts.sections import SectionName
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.operations import status
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags, load_settings
from hermes_rl_mcp.paths import Home

PARTS: tuple[SectionName, ...] = ("metrics", "rollouts", "log", "checkpoints", "diagnosis", "events")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    made = LiveRun(Home(tmp_path / "hermes"))
    yield made
    assert made.lock is not None
    made.lock.release()


@pytest.mark.anyio
async def test_beside_a_repeated_snapshot_only_changes_of_state_are_included(live: LiveRun) -> None:
    live.step(1)
    first = await live.operations().check_status(RUN_ID, include=PARTS)
    assert first.sections is not None and first.sections.metrics is not None
    assert [row["step"] for row in first.sections.metrics.rows] == [1]
    assert first.withheld == []
    live.step(2)
    again = await live.operations().check_status(RUN_ID, include=PARTS)
    assert again.rate_limited
    assert again.sections is not None and again.sections.events is not None
    assert [name for name in PARTS if getattr(again.sections, name) is not None] == ["events"]
    assert again.withheld == [name for name in PARTS if name != "events"]
    assert again.message is not None and "metrics" in again.message
    assert (await live.operations().check_status(RUN_ID)).withheld == [], "it is not stored with the snapshot"
    live.time += LIMIT_S
    fresh = await live.operations().check_status(RUN_ID, include=PARTS)
    assert fresh.sections is not None and fresh.sections.metrics is not None
    assert [row["step"] for row in fresh.sections.metrics.rows] == [1, 2]


@pytest.mark.anyio
async def test_a_change_of_state_brings_the_parts_with_it(live: LiveRun) -> None:
    await live.operations().check_status(RUN_ID)
    live.step(1)
    live.state.move(RunStatus.FAILED, "test", error="broke")
    ended = await live.operations().check_status(RUN_ID, include=["diagnosis", "metrics"])
    assert ended.sections is not None and ended.sections.diagnosis is not None
    assert ended.sections.diagnosis.error == "broke"
    assert ended.sections.metrics is not None and ended.sections.metrics.total == 1


@pytest.mark.anyio
async def test_a_limit_of_a_second_is_waited_out_for_a_part(live: LiveRun) -> None:
    operations = Operations(load_settings({"HERMES_HOME": str(live.home.root)}, Flags(profile="local")))
    await operations.check_status(RUN_ID)
    live.step(1)
    answer = await operations.check_status(RUN_ID, include=["metrics"])
    assert answer.sections is not None and answer.sections.metrics is not None
    assert (answer.rate_limited, answer.sections.metrics.total) == (False, 1)


@pytest.mark.anyio
async def test_a_part_that_there_is_not_is_an_error_that_names_those_that_there_are(live: LiveRun) -> None:
    with pytest.raises(InvalidValueError) as error:
        await live.operations().check_status(RUN_ID, include=["weights"])  # type: ignore[list-item]
    assert "rollouts" in error.value.payload["valid_values"]


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["plot", "events"])
async def test_a_wait_leaves_time_for_reading_and_drawing(
    live: LiveRun, part: SectionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_WAIT_S", status.PLOT_RESERVE_S + 0.3)
    live.step(1)
    await live.operations().check_status(RUN_ID)
    began = time.monotonic()
    await live.operations().check_status(RUN_ID, 2.0, include=[part])
    waited = time.monotonic() - began
    assert waited < status.PLOT_RESERVE_S
    assert (waited < 1.9) is (part == "plot")

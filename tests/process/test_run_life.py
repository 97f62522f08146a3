"""A run from start to end: every way it can go, with real processes."""

from __future__ import annotations

import anyio
import pytest
from process_rig import HOLD, Rig

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.runs import launch

pytestmark = pytest.mark.anyio


async def test_run_starts_in_order_and_completes_by_proof(rig: Rig) -> None:
    run_id = await rig.start()
    record = await rig.end(run_id)
    assert record.status is RunStatus.COMPLETED
    assert record.processes["trainer"].exit_code == 0 and not record.processes["trainer"].forced
    assert all(process.ready for process in record.processes.values())
    assert rig.store.metrics(run_id).lines[-1]["step"] == 3
    started = [event.reason.split()[0] for event in rig.events(run_id) if " started, pid " in event.reason]
    assert started == ["api", "trainer", "env"]
    assert [event.seq for event in rig.events(run_id)] == list(range(1, len(rig.events(run_id)) + 1))
    assert not rig.marked(run_id)

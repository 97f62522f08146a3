"""A run that continues another is made whole or not at all; a real supervisor carries it out over scripted children."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from process_rig import Knobs, Rig

from hermes_rl_mcp.contracts.runs import RunRequest, RunStatus
from hermes_rl_mcp.errors import ResumeError
from hermes_rl_mcp.runs import launch
from hermes_rl_mcp.runs.resume import Source, carry_over, continue_from, find_source

pytestmark = pytest.mark.anyio

ENV = {"total_steps": 8, "group_size": 2, "batch_size": 4, "max_token_length": 16}
SAVES: Knobs = {"trainer": {"checkpoint_every": 2}}


async def _killed_within_a_checkpoint(rig: Rig) -> str:
    """A run with a complete checkpoint of step 2 and a begun one of step 4."""
    knobs: Knobs = {"trainer": {"checkpoint_every": 2, "partial_checkpoint": 4, "hold_at": 4}}
    run_id = await rig.start(knobs, rig.request(env=ENV))
    half = rig.paths(run_id).checkpoints / "step_4"
    record = await rig.wait(run_id, lambda _: half.is_dir())
    trainer = record.processes["trainer"].identity
    assert trainer is not None
    os.kill(trainer.pid, signal.SIGKILL)
    assert (await rig.end(run_id)).status is RunStatus.FAILED
    return run_id


def _continued(rig: Rig, run_id: str) -> tuple[Source, RunRequest]:
    source = find_source(rig.home, run_id)
    return source, continue_from(source, rig.request(env=ENV))


async def test_fi_22_fi_37_a_run_killed_within_a_checkpoint_goes_on_from_the_one_before(rig: Rig) -> None:
    old = await _killed_within_a_checkpoint(rig)
    before = rig.store.get(old)
    source, asked = _continued(rig, old)
    assert source.step == 2
    record = await launch.start(rig.home, asked, rig.script(SAVES), prepare=partial(carry_over, source, asked))
    rig.started.append(record.run_id)
    assert (record.resumed_from, record.resumed_step) == (old, 2)
    assert (await rig.end(record.run_id)).status is RunStatus.COMPLETED
    assert [line["step"] for line in rig.store.metrics(record.run_id).lines] == list(range(1, 9))
    assert [one.marker.step for one in rig.store.checkpoints(record.run_id)] == [2, 4, 6, 8]
    assert rig.store.get(old) == before, "the run that was continued stays what it is"


async def test_a_continuation_that_cannot_be_prepared_leaves_no_trace(rig: Rig) -> None:
    old = await _killed_within_a_checkpoint(rig)
    source, asked = _continued(rig, old)
    (rig.paths(old).checkpoints / "step_2" / "adapter" / "adapter_model.safetensors").write_text("altered meanwhile")
    with pytest.raises(ResumeError, match="hash differs"):
        await launch.start(rig.home, asked, rig.script(SAVES), prepare=partial(carry_over, source, asked))
    assert [path.name for path in rig.home.runs.iterdir() if path.is_dir()] == [old]

"""A server that starts gives queued runs that a reboot left alone their turn, without being asked."""

from __future__ import annotations

import pytest
from mcp import Client
from process_rig import Rig

from hermes_rl_mcp.contracts.runs import Identity, RunStatus
from hermes_rl_mcp.operations.environments import select_environment
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.starting import start_training
from hermes_rl_mcp.runs.runconfig import first_record
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.server.app import build_server


def queued_before_the_reboot(rig: Rig) -> str:
    request = rig.request()
    paths = rig.paths(request.run_id)
    paths.dir.mkdir(parents=True)
    paths.request.write_text(request.model_dump_json())
    rig.home.logs.mkdir(parents=True)
    lost = Identity(pid=1, started_at=1.0, boot_id="the boot before")
    queued = first_record(rig.home, request).model_copy(update={"status": RunStatus.QUEUED, "supervisor": lost})
    RunState.create(paths, queued, "queued before the reboot")
    rig.started.append(request.run_id)
    return request.run_id


@pytest.mark.anyio
async def test_a_starting_server_relaunches_a_run_that_was_queued_before_the_reboot(rig: Rig) -> None:
    run_id = queued_before_the_reboot(rig)
    async with Client(build_server(Operations.from_environ(rig.script()))) as client:
        assert (await client.list_tools()).tools
        assert (await rig.end(run_id)).status is RunStatus.COMPLETED


@pytest.mark.anyio
async def test_a_start_comes_behind_what_was_queued_before_the_reboot(rig: Rig) -> None:
    """Also the start that comes before the server has looked for such runs."""
    earlier = queued_before_the_reboot(rig)
    context = Operations.from_environ(rig.script({"trainer": {"hold_at": 1}})).context
    await select_environment(context, "arithmetic")
    answer = await start_training(context)
    rig.started.append(answer.run_id)
    assert (answer.status, answer.queue_position) == ("queued", 1)
    assert earlier in answer.message
    for run_id in (earlier, answer.run_id):
        rig.go(run_id)
        assert (await rig.end(run_id)).status is RunStatus.COMPLETED

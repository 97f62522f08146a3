"""Two servers that start and follow many runs hold no more at the end than after the first few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest
from process_rig import Rig, until
from server_rig import ServerProcess, environ_with, select

from hermes_rl_mcp.contracts.runs import RunStatus
from hermes_rl_mcp.runs.process import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(1800)]

WARM_UP, RUNS = 6, 30
MEMORY_BYTES = 8 * 2**20
"""Allocators keep what they once had; a leak of the answers of 24 runs with their logs would be more."""
SPARE = 4
"""Threads and descriptors beyond those at the warm-up: two calls that met keep a thread more at hand for good. Each
server starts 12 of the 24 runs in between and follows the others, so what leaks with a run leaks 12 times at least."""


class Holds(NamedTuple):
    """What a server process has."""

    descriptors: int
    threads: int
    children: int
    memory_bytes: int

    def excess(self, before: Holds) -> str:
        """What it has more of than it may, empty if nothing."""
        more = {
            "descriptors": self.descriptors - before.descriptors - SPARE,
            "threads": self.threads - before.threads - SPARE,
            "children": self.children,
            "memory": self.memory_bytes - before.memory_bytes - MEMORY_BYTES,
        }
        return ", ".join(f"{name} {amount:+d}" for name, amount in more.items() if amount > 0)

    @classmethod
    def of(cls, pid: int) -> Holds:
        process = psutil.Process(pid)
        children = process.children(recursive=True)  # zombies included
        return cls(process.num_fds(), process.num_threads(), len(children), process.memory_info().rss)


@pytest.fixture
def servers(rig: Rig) -> Iterator[list[ServerProcess]]:
    select(rig)
    environ = environ_with(rig, rig.script({"env": {"grandchild": "session", "spew_bytes": 100_000}}))
    found = [ServerProcess(environ) for _ in range(2)]
    yield found
    for server in found:
        server.close()


async def test_servers_hold_no_more_after_thirty_runs_than_after_six(rig: Rig, servers: list[ServerProcess]) -> None:
    before: list[Holds] = []
    for number in range(RUNS):
        if number == WARM_UP:
            before = [Holds.of(server.pid) for server in servers]
        starting, other = servers[number % 2], servers[1 - number % 2]
        run_id = starting.call("rl_start_training")["run_id"]
        rig.started.append(run_id)
        status = ""
        while status != "completed":
            status = starting.call("rl_check_status", run_id=run_id, wait_seconds=5)["status"]
            assert status not in ("failed", "interrupted", "stopped"), rig.store.get(run_id).error
        assert other.call("rl_get_results", run_id=run_id)["status"] == RunStatus.COMPLETED
        assert other.call("rl_list_runs")["count"] == number + 1
        supervisor = rig.store.get(run_id).supervisor
        assert supervisor is not None
        await until(lambda gone=supervisor: not is_alive(gone), 60)
    for server, held in zip(servers, before, strict=True):
        # What the last call left is on its way: a child is still being waited for, idle threads end after some seconds.
        await until(
            lambda pid=server.pid, held=held: not Holds.of(pid).excess(held),
            60,
            lambda pid=server.pid, held=held: f"{held} became {Holds.of(pid)}",
        )
    assert not any(rig.marked(run_id) for run_id in rig.started)

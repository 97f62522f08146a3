"""FI-41: what a list, a status and a log's end cost does not depend on how much a run has written."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from many_runs import fill
from mcp import Client

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.launch import run_with_key
from hermes_rl_mcp.server.app import build_server

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to count what is read")

RUNS = 30
KIB = 1 << 10


class Counter:
    """Files opened by this process, and bytes it read."""

    def __init__(self) -> None:
        self.files = 0
        self._counting = False
        sys.addaudithook(self._hook)  # for good; it counts nothing outside of ``count``

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._counting and event == "open":
            self.files += 1

    async def count(self, call: Callable[[], Awaitable[object]]) -> tuple[int, int]:
        await call()  # what is loaded and cached once
        self.files, before, self._counting = 0, _bytes_read(), True
        try:
            await call()
        finally:
            self._counting = False
        return self.files, _bytes_read() - before


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.fixture(scope="module")
def counter() -> Counter:
    return Counter()


def server(folder: Path, environ: dict[str, str], steps: int, log_bytes: int) -> Operations:
    environ = {**environ, "HERMES_HOME": str(folder)}
    fill(Home.from_environ(environ), RUNS, steps=steps, log_bytes=log_bytes)
    return Operations.from_environ(environ)


@pytest.mark.anyio
async def test_fi_41_list_status_and_log_end_cost_the_same_however_long_the_runs_were(
    tmp_path: Path, environ: dict[str, str], counter: Counter
) -> None:
    small = server(tmp_path / "small", environ, steps=3000, log_bytes=1 << 20)
    large = server(tmp_path / "large", environ, steps=12_000, log_bytes=1 << 26)  # 7 GiB of logs
    for name, files, limit in (("list_runs", 5 * RUNS, 40 * KIB * RUNS), ("check_status", 60, 1024 * KIB)):
        cost = {}
        for which, operations in (("small", small), ("large", large)):
            arguments = ["00000001"] if name == "check_status" else [RUNS]
            cost[which] = await counter.count(partial(getattr(operations, name), *arguments))
        assert cost["large"][0] <= cost["small"][0] <= files, (name, cost)
        assert cost["large"][1] <= limit, (name, cost)
        assert cost["large"][1] < 1.2 * cost["small"][1], (name, cost)

    async with Client(build_server(large)) as client:

        async def log_end() -> None:
            answer = await client.read_resource("rl://runs/00000001/logs/trainer")
            assert "step 199 of 3000: reward 0.5" in str(answer.contents[0])

        assert (await counter.count(log_end))[1] < 64 * KIB


@pytest.mark.anyio
async def test_fi_41_a_list_of_few_reads_little_of_the_others_and_a_key_is_found_by_the_requests_alone(
    tmp_path: Path, environ: dict[str, str], counter: Counter
) -> None:
    operations = server(tmp_path, environ, steps=3000, log_bytes=1 << 20)
    few = await counter.count(partial(operations.list_runs, 2))
    everything = await counter.count(partial(operations.list_runs, RUNS))
    assert few[1] < 2 * KIB * RUNS < everything[1]
    found = {}

    async def by_key() -> None:
        for number in (1, RUNS):
            found[number] = run_with_key(operations.context.home, f"key-{number:08x}")

    assert (await counter.count(by_key))[1] < 2 * 8 * KIB * RUNS
    assert found == {number: f"{number:08x}" for number in (1, RUNS)}
    assert run_with_key(operations.context.home, "another") is None
    os.rename(operations.context.home.run("00000001").dir, operations.context.home.runs / ".gone-00000001")
    assert run_with_key(operations.context.home, "key-00000001") is None  # it is being deleted

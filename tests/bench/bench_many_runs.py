"""How long a server with 500 finished runs and 2 GB of logs takes: ``bench_many_runs.py [--runs 500]``.

Bars: rl_list_runs 0.5 s, rl_check_status 0.3 s, the end of a log 0.3 s. Measured twice: the operations of a warm
server in this process, and a real MCP client of a server over stdio; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

sys.path.insert(0, str(Path(__file__).parents[1]))
from many_runs import fill
from report import Report, progress

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.paths import PROCESS_LOGS, Home
from hermes_rl_mcp.runs.launch import run_with_key

BARS_S = {"list of 50": 0.5, "list of all": 0.5, "status": 0.3, "results": 0.3, "end of a log": 0.3, "key": 0.5}
STEPS = 3000
LOGS_BYTES = 2 << 30
REPEATS = 7

Call = Callable[[], Awaitable[object]]


async def median_s(call: Call) -> float:
    """Of several calls after one that is not counted."""
    took = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        await call()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


async def operations(environ: dict[str, str], ids: list[str]) -> dict[str, float]:
    server = Operations.from_environ(environ)
    home = server.context.home
    middle = ids[len(ids) // 2]

    async def key() -> None:
        await anyio.to_thread.run_sync(run_with_key, home, "no run has this key")

    calls: dict[str, Call] = {
        "list of 50": server.list_runs,
        "list of all": partial(server.list_runs, len(ids)),
        "status": partial(server.check_status, middle),
        "results": partial(server.get_results, middle),
        "key": key,
    }
    return {name: await median_s(call) for name, call in calls.items()}


async def client(environ: dict[str, str], ids: list[str]) -> dict[str, float]:
    middle = ids[len(ids) // 2]
    command = StdioServerParameters(command=sys.executable, args=["-P", "-m", "hermes_rl_mcp.server"], env=environ)
    async with Client(command, read_timeout_seconds=90) as mcp:

        async def tool(name: str, **arguments: Any) -> None:
            answer = await mcp.call_tool(name, arguments)
            assert not answer.is_error, answer.content

        async def log() -> None:
            answer = await mcp.read_resource(f"rl://runs/{middle}/logs/trainer")
            assert "step 199 of 3000" in str(answer.contents[0])

        calls: dict[str, Call] = {
            "list of 50": partial(tool, "rl_list_runs"),
            "status": partial(tool, "rl_check_status", run_id=middle),
            "results": partial(tool, "rl_get_results", run_id=middle),
            "end of a log": log,
        }
        return {name: await median_s(call) for name, call in calls.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    count = parser.parse_args().runs
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "HERMES_HOME": folder, "HERMES_RL_CLAIMS_DIR": f"{folder}/claims"}
        log_bytes = LOGS_BYTES // (count * len(PROCESS_LOGS))
        progress(f"many runs: making {count}")
        ids = fill(Home.from_environ(environ), count, steps=STEPS, log_bytes=log_bytes)
        for where, measure in (("operation", operations), ("MCP client", client)):
            for name, took_s in anyio.run(measure, environ, ids).items():
                report.within(f"{count} runs: {name}, {where}", took_s, "s", f"<= {BARS_S[name]}")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

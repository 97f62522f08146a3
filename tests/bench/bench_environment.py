"""What an environment costs beside sampling: ``python tests/bench/bench_environment.py [--rounds 3]``.

``process`` of 64 groups of the arithmetic environment against an endpoint in another process that answers at once with
recorded bytes. Time is that of this process alone (its CPU seconds), and on the wall, each per rollout; bar: 5 ms on
the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from report import ROOT, Report

from hermes_rl_mcp.envs import APIServerConfig
from hermes_rl_mcp.envs.loading import defaults_of, load_environment
from hermes_rl_mcp.envs.process import FORCED, Processor

GROUPS, GROUP_SIZE = 64, 8
ANSWER = [56, 257]
"""An 8 and the end, in ids of builtin:tiny."""
TINY = ROOT / "trainer" / "models" / "tiny"
BAR_MS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    walls: list[float] = []
    cpus: list[float] = []
    with endpoint() as url:
        for number in range(options.rounds + 1):
            wall_ms, cpu_ms = asyncio.run(measure(url))
            if number:  # the first one imports and loads
                walls.append(wall_ms)
                cpus.append(cpu_ms)
    report = Report()
    note = f"{GROUPS} groups of {GROUP_SIZE}, endpoint answers at once; HTTP of both sides is in it"
    report.within("environment: process, wall per rollout", walls, "ms", f"<= {BAR_MS}", note)
    report.within("environment: process, own CPU per rollout", cpus, "ms", None, note)
    return report.exit_code


async def measure(url: str) -> tuple[float, float]:
    """Milliseconds per rollout on the wall and of this process's CPU."""
    environment = load_environment(str(ROOT / "environments" / "arithmetic.py"))
    default, _ = defaults_of(environment)
    with tempfile.TemporaryDirectory() as folder:
        values = {"total_steps": GROUPS, "group_size": GROUP_SIZE, "tokenizer_name": str(TINY)}
        values |= {**FORCED, "data_path_to_save_groups": str(Path(folder) / "groups.jsonl")}
        config = default.model_copy(update=values)
        env = environment(config, [APIServerConfig(base_url=f"{url}/v1", server_type="vllm")])
        await env.setup()
        env.tokenizer  # noqa: B018 - loaded before the clock starts
        try:
            wall, cpu = time.perf_counter(), time.process_time()
            path = await Processor(env).run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            found = path.read_text(encoding="utf-8").count("\n")
            if found != GROUPS:
                raise RuntimeError(f"{found} groups were written where {GROUPS} were asked")
        finally:
            await env.cleanup()
            await env.server.close()
    rollouts = GROUPS * GROUP_SIZE
    return wall / rollouts * 1000, cpu / rollouts * 1000


@contextlib.contextmanager
def endpoint() -> Iterator[str]:
    """The address of a server of type vllm in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join(10)


def serve(pipe: Connection) -> None:
    """Every request gets the same bytes."""
    one = [[{str(token): -0.5}] for token in ANSWER]
    reply = {"text": [""] * GROUP_SIZE, "logprobs": [one] * GROUP_SIZE, "finish_reasons": ["stop"] * GROUP_SIZE}
    body = json.dumps(reply).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                lines = request.decode("latin-1").lower().split("\r\n")
                length = next(line.split(":")[1] for line in lines if line.startswith("content-length:"))
                await reader.readexactly(int(length))
                writer.write(head + body)
                await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())

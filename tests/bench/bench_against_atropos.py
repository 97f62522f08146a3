"""Our rollout API against ``run-api`` of atroposlib 0.4.0: ``bench_against_atropos.py [--rounds 3]``.

Both as processes, one after the other in turns, with the same client code and the same bodies; ours with its journal
on disk and all its checks; medians.
atroposlib goes into a virtual environment of its own under ``build/`` (with the uvicorn extras that it asks for);
where it cannot be had, nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from bench_rollout_api import BODIES, GROUP_SIZE, Client, make_body, ready, renumbered
from report import ROOT, Report, interleaved

VENV = ROOT / "build" / "atropos-0.4.0"
CLIENTS = 8
SEQUENCES = 128
START_TIMEOUT_S = 60.0
MEASURES = {
    "POST, 8 clients, raw": ("groups/s", ">= 2"),
    "POST, 8 clients, gzip": ("groups/s", ">= 2"),
    "GET /batch of 128, gzip": ("ms", "<= 0.125"),
    "memory per group": ("MB", "<= 0.5"),
}
"""Unit, and what ours divided by theirs must be."""


class UnavailableError(Exception):
    """atroposlib cannot be installed here."""


def atropos_python() -> Path:
    """The interpreter that has atroposlib's server. Installed once."""
    python = VENV / "bin" / "python"
    if not (VENV / "complete").exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
        steps = [
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            [*pip, "-c", str(ROOT / "constraints.txt"), "fastapi", "uvicorn[standard]", "pydantic"],
            [*pip, "--no-deps", "atroposlib==0.4.0"],
            [str(python), "-c", "import atroposlib.api"],
        ]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UnavailableError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        (VENV / "complete").touch()
    return python


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=log.parent)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def server(which: str, python: Path, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if which == "ours":
        journal = folder / f"journal_{port}.jsonl"
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.rollout_api", *address, "--journal", str(journal)]
    else:
        command = [str(python), "-m", "atroposlib.cli.run_api", *address]
    with running(command, folder / "server.log") as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                Client(port)("GET", "/info")
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{which} does not start: {(folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield port, process


def posting(port: int, bodies: list[bytes], seconds: float, zipped: bool) -> float:
    """Groups per second from CLIENTS clients that post one after the other."""
    headers = {"Content_Encoding": "gzip"} if zipped else {}
    counts = [0] * CLIENTS
    turn = iter(range(100_000, 10**9))
    end = time.perf_counter() + seconds

    def post(position: int) -> None:
        client = Client(port)
        while time.perf_counter() < end:
            number = next(turn)
            client("POST", "/scored_data", renumbered(bodies[number % len(bodies)], number, zipped), **headers)
            counts[position] += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=post, args=(position,)) for position in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def batch_ms(port: int, bodies: list[bytes]) -> float:
    """The median of several batches, each of groups just posted."""
    client = Client(port)
    took = []
    for _ in range(5):
        for body in bodies[: SEQUENCES // GROUP_SIZE]:
            client("POST", "/scored_data", renumbered(body, next(_numbers), False))
        began = time.perf_counter()
        data = client("GET", "/batch", Accept_Encoding="gzip")
        took.append((time.perf_counter() - began) * 1000)
        assert len(json.loads(gzip.decompress(data))["batch"]) == SEQUENCES // GROUP_SIZE
    return statistics.median(took)


_numbers = iter(range(10**6, 10**9))


def memory_mb(port: int, process: psutil.Process, bodies: list[bytes]) -> float:
    client = Client(port)
    before = process.memory_info().rss
    for body in bodies:
        client("POST", "/scored_data", body)
    return (process.memory_info().rss - before) / len(bodies) / 1e6


def measure(which: str, python: Path, bodies: list[bytes], zipped: list[bytes], seconds: float) -> dict[str, float]:
    """Each measurement with a fresh server."""
    found: dict[str, float] = {}
    measures: dict[str, Callable[[int, psutil.Process], float]] = {
        "memory per group": lambda port, process: memory_mb(port, process, bodies),
        "GET /batch of 128, gzip": lambda port, _: batch_ms(port, bodies),
        "POST, 8 clients, raw": lambda port, _: posting(port, bodies, seconds, False),
        "POST, 8 clients, gzip": lambda port, _: posting(port, zipped, seconds, True),
    }
    for name, run in measures.items():
        with tempfile.TemporaryDirectory() as folder, server(which, python, Path(folder)) as (port, process):
            ready(port, SEQUENCES)
            found[name] = run(port, process)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server")
    parser.add_argument("--seconds", type=float, default=4.0, help="per posting measurement")
    arguments = parser.parse_args()
    report = Report()
    try:
        python = atropos_python()
    except UnavailableError as error:
        report.skipped("rollout API against atroposlib", f"atroposlib 0.4.0 cannot be installed here ({error})")
        return report.exit_code
    random_ = random.Random(0)
    bodies = [make_body(tag, random_) for tag in range(BODIES)]
    zipped = [gzip.compress(body[body.index(b",") :], 1) for body in bodies]
    found = interleaved(
        {which: partial(measure, which, python, bodies, zipped, arguments.seconds) for which in ("ours", "theirs")},
        arguments.rounds,
        label="rollout API",
    )
    for name, (unit, bar) in MEASURES.items():
        ours, theirs = ([one[name] for one in found[which]] for which in ("ours", "theirs"))
        report.compare(f"rollout API: {name}", ours, theirs, unit, bar, "against run-api of atroposlib 0.4.0")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

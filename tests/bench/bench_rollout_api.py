"""Measures the rollout API as a process: ``python tests/bench/bench_rollout_api.py [--seconds 4]``.

Groups of 16 sequences of 1,000 tokens with logprobs, as the reference measurements of Atropos' server used. Clients run
in a process of their own, but share the machine's cores with the server. For information; there are no bars.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
from report import Report

GROUP_SIZE, TOKENS = 16, 1000
BODIES = 64
START = b'{"tokens": [['


class Line(NamedTuple):
    """One figure."""

    name: str
    value: float
    unit: str
    note: str


def make_body(tag: int, random_: random.Random) -> bytes:
    prompt = 100
    tokens = [[tag] + [random_.randrange(150_000) for _ in range(TOKENS - 1)] for _ in range(GROUP_SIZE)]
    logprobs = [[-random_.expovariate(2.0) for _ in range(TOKENS - prompt)] for _ in range(GROUP_SIZE)]
    return json.dumps(
        {
            "tokens": tokens,
            "masks": [[-100] * prompt + row[prompt:] for row in tokens],
            "scores": [random_.random() for _ in range(GROUP_SIZE)],
            "inference_logprobs": [[1.0] * prompt + row for row in logprobs],
            "env_id": 0,
        }
    ).encode()


def renumbered(body: bytes, number: int, zipped: bool) -> bytes:
    """The body with another first token, so that it does not pass for a repeated post. Zipped as two gzip members."""
    head = START + b"%d" % number
    return gzip.compress(head, 1) + body if zipped else head + body[body.index(b",") :]


class Client:
    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def __call__(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, {"Content-Type": "application/json", **named})
        reply = self.connection.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {data[:300]!r}")
        return data


@contextlib.contextmanager
def server() -> Iterator[tuple[int, psutil.Process]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.rollout_api", "--listen-fd", str(sock.fileno())]
        process = subprocess.Popen(command, pass_fds=[sock.fileno()], stderr=subprocess.DEVNULL)
        port: int = sock.getsockname()[1]
        try:
            while True:
                with contextlib.suppress(OSError):
                    Client(port)("GET", "/health")
                    break
                time.sleep(0.05)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def ready(port: int, batch_size: int) -> None:
    """A fresh state with one environment."""
    client = Client(port)
    client("GET", "/reset_data")
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": batch_size,
        "max_token_len": 2048,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 100,
    }
    client("POST", "/register", json.dumps(registration).encode())
    client("GET", "/batch")
    env = {"max_token_length": 2048, "desired_name": "b", "weight": 1.0, "group_size": GROUP_SIZE}
    client("POST", "/register-env", json.dumps(env).encode())


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def posting(
    port: int, process: psutil.Process, bodies: list[bytes], clients: int, seconds: float, zipped: bool
) -> Line:
    ready(port, 128)
    headers = {"Content_Encoding": "gzip"} if zipped else {}
    latencies: list[list[float]] = [[] for _ in range(clients)]
    polls: list[float] = []
    stop = threading.Event()
    turn = iter(range(100_000, 10**9))

    def post(own: list[float]) -> None:
        client = Client(port)
        while not stop.is_set():
            number = next(turn)
            body = renumbered(bodies[number % len(bodies)], number, zipped)
            own.append(timed(lambda body=body: client("POST", "/scored_data", body, **headers)))  # type: ignore[misc]

    def take_and_poll() -> None:
        """A trainer that keeps the queue short, and an environment's poll beside it."""
        client = Client(port)
        while not stop.is_set():
            polls.append(timed(lambda: client("GET", "/status-env?env_id=0")))
            time.sleep(0.02)

    cpu = sum(process.cpu_times()[:2])
    threads = [threading.Thread(target=post, args=(own,)) for own in latencies]
    threads.append(threading.Thread(target=take_and_poll))
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    cpu = sum(process.cpu_times()[:2]) - cpu
    every = [value for own in latencies for value in own]
    return Line(
        f"POST /scored_data, {clients} client(s), {'gzip' if zipped else 'raw'}",
        len(every) / seconds,
        "groups/s",
        f"half within {statistics.median(every):.1f} ms, 95% within {percentile(every, 0.95):.1f} ms, "
        f"{cpu * 1000 / len(every):.1f} ms of the server's CPU each, a poll beside it {percentile(polls, 0.95):.1f} ms",
    )


def batches(port: int, bodies: list[bytes], sequences: int, encoding: str) -> Line:
    took, worst_poll, size = [], [], 0
    for _ in range(3):
        ready(port, sequences)
        client, poller = Client(port), Client(port)
        for body in bodies[: sequences // GROUP_SIZE]:
            client("POST", "/scored_data", body)
        done = threading.Event()
        polls = [0.0]

        def poll(polls: list[float] = polls, done: threading.Event = done, poller: Client = poller) -> None:
            while not done.is_set():
                polls.append(timed(lambda: poller("GET", "/status-env?env_id=0")))

        thread = threading.Thread(target=poll)
        thread.start()
        began = time.perf_counter()
        size = len(client("GET", "/batch", Accept_Encoding=encoding))
        took.append((time.perf_counter() - began) * 1000)
        done.set()
        thread.join()
        worst_poll.append(max(polls))
    return Line(
        f"GET /batch, {sequences} sequences, {encoding}",
        statistics.median(took),
        "ms",
        f"{size / 1e6:.2f} MB on the wire, the slowest poll beside it {max(worst_poll):.1f} ms",
    )


def memory(port: int, process: psutil.Process, bodies: list[bytes]) -> Line:
    ready(port, 4096)
    client = Client(port)
    before = process.memory_info().rss
    for body in bodies:
        client("POST", "/scored_data", body)
    growth = (process.memory_info().rss - before) / len(bodies) / 1e6
    return Line("memory per group", growth, "MB", f"{len(bodies[0]) / 1e6:.3f} MB as JSON")


def several(port: int, bodies: list[bytes]) -> Line:
    ready(port, 4096)
    client = Client(port)
    lists = [b"[" + b",".join(bodies[start : start + 8]) + b"]" for start in range(0, BODIES, 8)]
    took = [timed(lambda body=body: client("POST", "/scored_data_list", body)) for body in lists]  # type: ignore[misc]
    return Line("POST /scored_data_list of 8", statistics.median(took), "ms", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="per posting measurement")
    seconds = parser.parse_args().seconds
    report = Report()
    random_ = random.Random(0)
    bodies = [make_body(tag, random_) for tag in range(BODIES)]
    zipped = [gzip.compress(body[body.index(b",") :], 1) for body in bodies]  # all behind the first token
    with server() as (port, process):
        results: list[Callable[[], Line]] = [
            lambda: memory(port, process, bodies),
            lambda: posting(port, process, bodies, 1, seconds, False),
            lambda: posting(port, process, zipped, 1, seconds, True),
            lambda: posting(port, process, bodies, 8, seconds, False),
            lambda: posting(port, process, zipped, 8, seconds, True),
            *(
                lambda s=sequences, e=encoding: batches(port, bodies, s, e)  # type: ignore[misc]
                for sequences in (128, 512)
                for encoding in ("gzip", "identity")
            ),
            lambda: several(port, bodies),
        ]
        for result in results:
            line = result()
            report.within(f"rollout API alone: {line.name}", line.value, line.unit, None, line.note)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

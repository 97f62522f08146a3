"""What calls of a running server take, with 20 runs on disk: ``bench_server_calls.py [--runs 20]``.

Bars: 200 calls of the reading tools in turns over stdio, half of them within 15 ms and 99 of 100 within 100 ms;
streamable HTTP, 150 calls of rl_list_environments in a second by four callers that share the machine with the server;
the idle server, 120 MB. What all reading tools in turns reach over HTTP is for information: they read runs from disk.
Callers speak the protocol themselves, so that no client library is measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_server_start import ERAS, META
from many_runs import fill
from report import Report, progress

from hermes_rl_mcp.loopback import bound_socket
from hermes_rl_mcp.paths import Home

CALLS = 200
HTTP_CALLS = 600
CALLERS = 4
STEPS = 1000
LOG_BYTES = 1 << 20
SERVER = [sys.executable, "-P", "-m", "hermes_rl_mcp.server"]

Call = tuple[str, dict[str, Any]]


def reading_calls(run_id: str) -> list[Call]:
    return [
        ("rl_list_environments", {}),
        ("rl_get_current_config", {}),
        ("rl_check_status", {"run_id": run_id}),
        ("rl_get_results", {"run_id": run_id}),
        ("rl_list_runs", {}),
    ]


class Stdio:
    """A server over pipes, shaken hands with."""

    def __init__(self, environ: dict[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(SERVER, env=environ, **pipes)  # type: ignore[call-overload]
        self._number = 1
        for message in ERAS["2025-11-25"]:
            self.answer = self._send(message)

    def call(self, name: str, arguments: dict[str, Any]) -> float:
        """Seconds."""
        self._number += 1
        params = {"name": name, "arguments": arguments}
        began = time.perf_counter()
        answer = self._send({"id": self._number, "method": "tools/call", "params": params})
        took_s = time.perf_counter() - began
        assert not answer["result"].get("isError"), answer
        return took_s

    def _send(self, message: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()
        while "id" in message:
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
            if answer.get("id") == message["id"]:
                return answer
        return {}

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def megabytes(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


def stdio(report: Report, environ: dict[str, str], run_id: str, runs: int) -> None:
    server = Stdio(environ)
    try:
        time.sleep(1)
        report.within("server: memory when idle, stdio", megabytes(server.process.pid), "MB", "<= 120")
        server.call("rl_select_environment", {"name": "arithmetic"})
        calls = reading_calls(run_id)
        for call in calls:
            server.call(*call)
        took: dict[str, list[float]] = {name: [] for name, _ in calls}
        for number in range(CALLS):
            name, arguments = calls[number % len(calls)]
            took[name].append(server.call(name, arguments) * 1e3)
        every = sorted(ms for values in took.values() for ms in values)
        medians = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in took.items())
        what = f"server: call of a reading tool, {runs} runs"
        report.within(f"{what}, median", every[len(every) // 2], "ms", "<= 15", medians)
        report.within(f"{what}, 99 of 100", every[int(len(every) * 0.99)], "ms", "<= 100", f"worst {every[-1]:.1f} ms")
        after = f"after {CALLS} calls {megabytes(server.process.pid):.0f} MB"
        progress(after)
    finally:
        server.close()


@contextmanager
def http_server(environ: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Port and process id."""
    probe = bound_socket("127.0.0.1", 0)
    port = probe.getsockname()[1]
    probe.close()
    command = [*SERVER, "--transport", "streamable-http", "--port", str(port)]
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    Caller(port, "2026-07-28").list_tools()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield port, process.pid
        finally:
            process.terminate()


class Caller:
    """One connection that is kept open, in one of the protocol's eras."""

    def __init__(self, port: int, era: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._era = era
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": era,
        }
        self._number = 0
        if era != "2026-07-28":
            shake, ready, _ = ERAS["2025-11-25"]
            reply = self._post(shake)
            self._headers["Mcp-Session-Id"] = reply.headers["Mcp-Session-Id"]
            self._post(ready)

    def list_tools(self) -> None:
        self._ask("tools/list", {})

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        answer = self._ask("tools/call", {"name": name, "arguments": arguments})
        assert not answer["result"].get("isError"), answer

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        if self._era == "2026-07-28":
            params = {**params, "_meta": META}
            self._headers["Mcp-Method"] = method
            if "name" in params:
                self._headers["Mcp-Name"] = params["name"]
            else:
                self._headers.pop("Mcp-Name", None)
        reply = self._post({"id": self._number, "method": method, "params": params})
        for line in reply.text.splitlines():
            if line.startswith(("data: {", "{")):
                answer: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if answer.get("id") == self._number:
                    return answer
        raise AssertionError(f"no answer in {reply.status} {reply.text[:500]!r}")

    def _post(self, message: dict[str, Any]) -> _Reply:
        self._connection.request("POST", "/mcp", json.dumps({"jsonrpc": "2.0", **message}), self._headers)
        answer = self._connection.getresponse()
        return _Reply(answer.status, dict(answer.getheaders()), answer.read().decode())


class _Reply:
    def __init__(self, status: int, headers: dict[str, str], text: str) -> None:
        self.status = status
        self.headers = {name.title(): value for name, value in headers.items()}
        self.text = text


def per_second(port: int, era: str, calls: Sequence[Call], count: int) -> float:
    """Calls in a second, by several callers at once."""
    callers = [Caller(port, era) for _ in range(CALLERS)]

    def work(first: int) -> None:
        for number in range(first, count, CALLERS):
            callers[first].call(*calls[number % len(calls)])

    began = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as threads:
        list(threads.map(work, range(CALLERS)))
    return count / (time.perf_counter() - began)


def over_http(report: Report, environ: dict[str, str], run_id: str) -> None:
    with http_server(environ) as (port, pid):
        time.sleep(1)
        report.within("server: memory when idle, HTTP", megabytes(pid), "MB", "<= 120")
        calls = reading_calls(run_id)
        for era in ("2025-11-25", "2026-07-28"):
            for what, some, bar in (("rl_list_environments", calls[:1], ">= 150"), ("all reading tools", calls, None)):
                per_second(port, era, some, 40)
                rates = [per_second(port, era, some, HTTP_CALLS // 3) for _ in range(3)]
                report.within(f"server: streamable HTTP, {era}, {what}", rates, "calls/s", bar, f"{CALLERS} callers")
        progress(f"after all calls {megabytes(pid):.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "HERMES_HOME": folder, "HERMES_RL_CLAIMS_DIR": f"{folder}/claims"}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        ids = fill(Home.from_environ(environ), runs, steps=STEPS, log_bytes=LOG_BYTES)
        middle = ids[len(ids) // 2]
        stdio(report, environ, middle, runs)
        over_http(report, environ, middle)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

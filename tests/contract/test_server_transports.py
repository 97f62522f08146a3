"""The server's process on its transports: who gets in over HTTP, what reaches stdout, and when it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import httpx2
import psutil
import pytest
from leash import leashed, on_leash
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp_rig import SERVER, environment_file
from served import free_port
from test_server_process import answering, started

TOKEN = "0123456789abcdef-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ROUTES = [
    *(("POST", "/mcp"), ("GET", "/mcp"), ("DELETE", "/mcp"), ("GET", "/sse"), ("POST", "/messages/?session_id=1")),
    *(("GET", "/dashboard"), ("POST", "/dashboard/runs/00000001/stop"), ("GET", "/"), ("GET", "/nothing")),
]


@contextmanager
def http_server(environ: dict[str, str], *flags: str, host: str = "127.0.0.1") -> Iterator[tuple[str, Any]]:
    """Address to call it at, and the process. It listens before it says so."""
    port = free_port()
    command = on_leash("hermes_rl_mcp.server", "--port", str(port), "--host", host, *flags)
    with started(leashed({"HERMES_RL_TRANSPORT": "streamable-http", **environ}), *command) as process:
        deadline = time.monotonic() + 100
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/nothing")
                break
            except httpx.HTTPError:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process


@asynccontextmanager
async def client(address: str, kind: str, mode: Any, headers: dict[str, str]) -> AsyncIterator[Client]:
    if kind == "sse":
        async with Client(sse_client(f"{address}/sse", headers=headers), mode=mode, read_timeout_seconds=60) as made:
            yield made
        return
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        transport = streamable_http_client(f"{address}/mcp", http_client=http)
        async with Client(transport, mode=mode, read_timeout_seconds=60) as made:
            yield made


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("transport", "modes"),
    [("sse", {"sse": "legacy", "mcp": "auto"}), ("streamable-http", {"sse": "auto", "mcp": "legacy"})],
)
async def test_sec_09_one_http_server_serves_both_transports_and_no_route_without_the_token(
    environ: dict[str, str], tmp_path: Path, transport: str, modes: dict[str, str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with http_server(environ, "--transport", transport, "--token-file", str(token)) as (address, _):
        for kind, mode in modes.items():
            async with client(address, kind, mode, BEARER) as caller:
                assert len((await caller.list_tools()).tools) == 10
                assert not (await caller.call_tool("rl_list_runs", {})).is_error
        async with httpx.AsyncClient(base_url=address) as web:
            for method, path in ROUTES:
                for headers, code in (
                    ({}, 401),
                    ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
                    ({**BEARER, "Host": "evil.example"}, 421),
                    ({**BEARER, "Origin": "http://evil.example"}, 403),
                ):
                    answer = await web.request(method, path, headers=headers, json={})
                    shown = path.startswith("/dashboard") and code == 401
                    assert answer.status_code == code or (shown and answer.status_code in (401, 403)), (method, path)
                    assert "access-control-allow-origin" not in answer.headers
                    assert TOKEN not in answer.text


@pytest.mark.anyio
async def test_with_a_token_other_machines_are_served_under_the_address_they_call(environ: dict[str, str]) -> None:
    environ = {**environ, "HERMES_RL_TOKEN": TOKEN}
    with http_server(environ, "--accept-host", "gpu.example", host="0.0.0.0") as (address, _):
        async with httpx.AsyncClient(base_url=address, headers=BEARER) as web:
            for host, code in (
                *(("127.0.0.1", 404), ("gpu.example", 404), ("GPU.example:99", 404)),
                *(("10.255.255.1", 421), ("evil.example", 421), ("0.0.0.0", 421)),
            ):
                assert (await web.get("/nothing", headers={"Host": host})).status_code == code, host


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_http_server_with_open_streams_leaves_within_seconds_of_a_signal_with_code_0(
    environ: dict[str, str], number: signal.Signals
) -> None:
    with http_server(environ) as (address, process):
        async with (
            httpx.AsyncClient(base_url=address, timeout=60) as web,
            web.stream("GET", "/sse") as events,
            client(address, "mcp", "legacy", {}) as caller,
        ):
            assert events.status_code == 200
            await caller.list_tools()
            process.send_signal(number)
            before = time.monotonic()
            while process.poll() is None:
                assert time.monotonic() - before < 60  # 5 s, and room for a busy machine
                await anyio.sleep(0.05)
        assert process.returncode == 0
        assert b"Traceback" not in process.communicate()[1]


def test_a_port_that_is_taken_is_a_sentence(environ: dict[str, str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, *SERVER, "--transport", "sse", "--port", str(port)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_fi_16_nothing_but_messages_reaches_stdout_whatever_prints(environ: dict[str, str], tmp_path: Path) -> None:
    """Threads, libraries and children of the server print all the time; a child of it reads its stdin to the end."""
    body = "import os, subprocess\nprint('noise at import')\nos.write(1, b'noise')\nsubprocess.run(['echo', 'noise'])\n"
    environment_file(tmp_path / "envs", body)
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        textwrap.dedent("""
        import os, subprocess, sys, threading, time

        first = sys.stdout

        def make():
            while sys.stdout is first:  # until the server has taken the wire
                time.sleep(0.001)
            while True:
                print("noise of print")
                first.write("noise of the first stdout\\n")
                first.flush()
                os.write(1, b"noise of write")
                subprocess.run(["sh", "-c", "echo noise of a child; cat"])
                time.sleep(0.01)

        threading.Thread(target=make, daemon=True).start()
        from hermes_rl_mcp.server.__main__ import main
        main()
        """)
    )
    initialize = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    calls = [("rl_select_environment", {"name": "own"}), ("rl_get_current_config", {}), ("rl_nothing", {})]
    calls += [("rl_list_runs", {})] * 20
    messages: list[dict[str, Any]] = [
        {"id": 0, "method": "initialize", "params": initialize},
        {"method": "notifications/initialized"},
        {"id": 1, "method": "tools/list"},
    ]
    for number, (name, arguments) in enumerate(calls, 2):
        params = {"name": name, "arguments": arguments}
        messages.append({"id": number, "method": "tools/call", "params": params})
    environ = {**environ, "HERMES_RL_ENV_DIRS": str(tmp_path / "envs")}
    with started(environ, sys.executable, "-P", str(noisy)) as process:
        said = b""
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            process.stdin.flush()
            if "id" in message:
                said += process.stdout.readline()
        process.stdin.close()
        said += process.stdout.read()
        process.stdin = None
        errors = process.stderr.read()
    answers = []
    for line in said.decode().splitlines(keepends=True):
        answer, end = json.JSONDecoder().raw_decode(line)
        assert line[end:] == "\n", "every byte belongs to a message"
        answers.append(answer)
    assert [answer["id"] for answer in answers] == list(range(len(calls) + 2))
    assert not answers[2]["result"].get("isError")
    for kind in (b"of print", b"of the first stdout", b"of write", b"of a child"):
        assert b"noise " + kind in errors


PARENT = """
import os, subprocess, sys, time
server = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=0, stdout=1)
print(server.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_stdio_server_whose_starter_died_leaves_although_somebody_holds_its_stdin(environ: dict[str, str]) -> None:
    with started(environ, sys.executable, "-c", PARENT, *SERVER) as parent:
        pid = int(parent.stderr.readline())
        server = psutil.Process(pid)
        answering(parent)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        psutil.wait_procs([server], timeout=10)
        assert not server.is_running()


def test_a_log_file_gets_what_stderr_gets_and_is_its_owners_alone(environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "logs" / "server.log"
    with started({**environ, "HERMES_RL_LOG_FILE": str(file)}) as process:
        answering(process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=10)
    assert "leaving (SIGTERM)" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0

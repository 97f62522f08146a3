"""The server's process: flags, transports, and leaving at once when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from leash import leash, leashed, on_leash
from mcp import Client
from mcp.client.sse import sse_client
from mcp_rig import SERVER
from served import free_port

from hermes_rl_mcp import __version__

INITIALIZE = (
    b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},'
    b'"clientInfo":{"name":"t","version":"1"}}}\n'
)
LEAVES_S = 2.0
"""1 s, and room for a busy machine."""


@contextmanager
def started(environ: dict[str, str], *command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command or [sys.executable, *SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        pass_fds=(leash(),),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answering(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(INITIALIZE)
    process.stdin.flush()
    assert b'"serverInfo"' in process.stdout.readline()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_a_stdio_server_leaves_with_code_0_when_it_is_signalled_or_its_client_goes(
    environ: dict[str, str], how: signal.Signals | None
) -> None:
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= LEAVES_S and len(took_s) < 3):  # a busy machine may hold one back
        with started(environ) as process:
            answering(process)
            before = time.monotonic()
            if how is None:
                assert process.stdin is not None
                process.stdin.close()
                process.stdin = None
            else:
                process.send_signal(how)
            assert process.wait(timeout=100) == 0
            took_s.append(time.monotonic() - before)
    assert min(took_s) < LEAVES_S, took_s


@pytest.mark.parametrize("stdin_stays_open", [True, False])
def test_a_stdio_server_whose_answers_nobody_reads_leaves_without_a_traceback(
    environ: dict[str, str], stdin_stays_open: bool
) -> None:
    with started(environ) as process:
        answering(process)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdout = None
        process.stdin.write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        process.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}\n')
        process.stdin.flush()
        if not stdin_stays_open:
            process.stdin.close()
            process.stdin = None
        assert process.wait(timeout=100) == 0
        assert b"Traceback" not in process.stderr.read()


def test_version_and_bad_flags(environ: dict[str, str]) -> None:
    def run(*flags: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *SERVER, *flags],
            env={**environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    assert run("--version") == (0, f"hermes-rl-mcp {__version__}\n")
    for flags, says in (
        (("--transport", "sse", "--host", "0.0.0.0"), "there is no token"),
        (("--transport", "websocket"), "not one of"),
        (("--nonsense",), "unrecognized arguments"),
        (("--port", "x"), "is no port"),
        (("--port", "65536"), "is no port"),
        (("--profile", "nope"), "hermes, local"),
    ):
        code, output = run(*flags)
        assert code == 2
        assert says in output
    assert "not one of" in run(HERMES_RL_TRANSPORT="websocket")[1]


@contextmanager
def http_server(environ: dict[str, str], transport: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    environ = leashed({**environ, "HERMES_RL_TRANSPORT": transport, "HERMES_RL_PORT": str(port)})
    with started(environ, *on_leash("hermes_rl_mcp.server")) as process:  # unlike over stdio, no pipe ends it
        deadline = time.monotonic() + 100
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                os.sched_yield()
        yield f"http://127.0.0.1:{port}", process


@pytest.mark.anyio
async def test_sec_09_streamable_http_serves_the_tools_and_refuses_strangers(environ: dict[str, str]) -> None:
    with http_server(environ, "streamable-http") as (address, process):
        async with Client(f"{address}/mcp") as client:
            assert len((await client.list_tools()).tools) == 10
        async with httpx.AsyncClient() as web:
            for headers, code in (({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403)):
                answer = await web.post(f"{address}/mcp", headers=headers, json={"jsonrpc": "2.0"})
                assert answer.status_code == code
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=100)


@pytest.mark.anyio
async def test_sse_serves_the_tools(environ: dict[str, str]) -> None:
    with http_server(environ, "sse") as (address, _):
        async with Client(sse_client(f"{address}/sse")) as client:
            assert len((await client.list_tools()).tools) == 10

"""What the end-to-end tests share: the demo as a child, a client of a real server, and a user of its results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from mcp import Client, StdioServerParameters

STOP_TIMEOUT_S = 200
Call = Callable[..., Any]
Connect = Callable[..., AbstractAsyncContextManager[Call]]


class Demo:
    """``hermes-rl demo --json`` as a child, its stderr read as it comes."""

    def __init__(self, environ: dict[str, str], *args: str) -> None:
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "demo", "--json", *args]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.shown = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self.shown += line
                self._changed.notify_all()

    def wait_for(self, text: str, timeout_s: float) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.shown, timeout_s), self.shown

    def finish(self, timeout_s: float = 200) -> tuple[int, dict[str, Any]]:
        """Exit code, and the one JSON object on stdout."""
        assert self.process.stdout is not None and self.process.stderr is not None
        in_time = True
        try:
            code = self.process.wait(timeout_s)  # its one line on stdout fits into the pipe
        except subprocess.TimeoutExpired:
            in_time = False
            self.process.send_signal(signal.SIGINT)  # so that it stops its run
            code = self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.process.kill()
        self._reader.join(10)
        out = self.process.stdout.read()
        self.process.stdout.close()
        self.process.stderr.close()
        assert in_time, f"took more than {timeout_s} s:\n{self.shown}"
        lines = out.splitlines()
        assert len(lines) == 1, (lines, self.shown)
        return code, json.loads(lines[0])

    def close(self) -> None:
        """Ends it in whatever state it is."""
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def start_demo(environ: dict[str, str]) -> Iterator[Callable[..., Demo]]:
    """``start_demo("--steps", "3")``."""
    started: list[Demo] = []

    def start(*args: str) -> Demo:
        started.append(Demo(environ, *args))
        return started[-1]

    yield start
    for demo in started:
        demo.close()


@pytest.fixture
def connect(environ: dict[str, str]) -> Connect:
    """``async with connect() as call``: a new server process, and ``await call(tool, **arguments)``. Keywords of
    ``connect`` are further variables of the server's environment."""

    @asynccontextmanager
    async def session(**variables: str) -> AsyncIterator[Call]:
        server = StdioServerParameters(
            command=sys.executable, args=["-P", "-m", "hermes_rl_mcp.server"], env={**environ, **variables}
        )
        async with Client(server, read_timeout_seconds=300) as client:

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                answer = await client.call_tool(tool, arguments)
                assert not answer.is_error, answer.content
                assert answer.structured_content is not None
                return answer.structured_content

            yield call

    return session


@pytest.fixture
def processes_left(environ: dict[str, str]) -> Callable[..., list[str]]:
    """``processes_left(timeout_s=60)``: command lines of processes of this test's home that do not end in that time."""

    def living() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HERMES_HOME") == environ["HERMES_HOME"]:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def left(timeout_s: float = 60) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while (found := living()) and time.monotonic() < deadline:
            psutil.wait_procs(found, timeout=0.2)
        names = []
        for process in found:
            with suppress(psutil.Error):  # gone meanwhile
                names.append(" ".join(process.cmdline()))
        return names

    return left


@pytest.fixture
def logit_change() -> Callable[[Path, Path, str], float]:
    """``logit_change(base, adapter, prompt)``: what a user does with a result, with stock transformers and peft."""

    def largest(base: Path, adapter: Path, prompt: str) -> float:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(base)(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            before = model(ids).logits
            after = PeftModel.from_pretrained(model, adapter)(ids).logits
        return float((after - before).abs().max())

    return largest

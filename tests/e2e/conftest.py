"""A client of a real server, as the end-to-end tests use it: connect, call tools, close as the SDK does."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mcp import Client, StdioServerParameters

Call = Callable[..., Any]
Connect = Callable[[], AbstractAsyncContextManager[Call]]


@pytest.fixture
def connect(environ: dict[str, str]) -> Connect:
    """``async with connect() as call``: a new server process, and ``await call(tool, **arguments)``."""

    @asynccontextmanager
    async def session() -> AsyncIterator[Call]:
        server = StdioServerParameters(command=sys.executable, args=["-P", "-m", "hermes_rl_mcp.server"], env=environ)
        async with Client(server, read_timeout_seconds=120) as client:

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                answer = await client.call_tool(tool, arguments)
                assert not answer.is_error, answer.content
                assert answer.structured_content is not None
                return answer.structured_content

            yield call

    return session


@pytest.fixture
def processes_left(environ: dict[str, str]) -> Callable[..., list[str]]:
    """``processes_left(timeout_s=10)``: command lines of processes of this test's home that do not end in that time."""

    def living() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HERMES_HOME") == environ["HERMES_HOME"]:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def left(timeout_s: float = 10) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while (found := living()) and time.monotonic() < deadline:
            psutil.wait_procs(found, timeout=0.2)
        return [" ".join(process.cmdline()) for process in found if process.is_running()]

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

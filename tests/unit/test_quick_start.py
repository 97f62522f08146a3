"""What the quick start changes in other libraries while the server is imported is as it was before afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys, types, typing
from pydantic import BaseModel, TypeAdapter
from hermes_rl_mcp.server.startup import quick_start

def state():
    rebuild, later = BaseModel.__dict__["model_rebuild"], TypeAdapter.__dict__.get("_defer_build")
    boxes, compiler = sys.modules.get("rich", "importable"), vars(typing).get("compile")
    return dict(BaseModel.model_config), rebuild, later, gc.isenabled(), boxes, compiler

before = state()
try:
    with quick_start():
        assert state() != before
        if sys.version_info < (3, 14):  # later ones compile an annotation when it is asked for
            first, second = (typing.ForwardRef("int | None").__forward_code__ for _ in range(2))
            assert first is second
        from hermes_rl_mcp.server.app import build_server
        %s
except ZeroDivisionError:
    pass
assert state() == before
assert "mcp.client" not in sys.modules, "a server has no use for it"
import rich
import mcp, httpx2
from concurrent.futures import ThreadPoolExecutor
assert "httpx2._client" not in sys.modules
sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(4) as threads:
    found = list(threads.map(lambda name: getattr(httpx2, name), ["Client", "AsyncClient", "get", "Timeout"] * 4))
assert found[:4] == [httpx2.Client, httpx2.AsyncClient, httpx2.get, httpx2.Timeout]
from mcp import Client
assert mcp.Client is Client and type(mcp) is type(httpx2) is types.ModuleType
class Mine(BaseModel):
    x: int
assert Mine.__pydantic_complete__
"""


@pytest.mark.parametrize("then", ["pass", "1 / 0"], ids=["done", "failed"])
def test_libraries_are_left_as_they_were(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM % then],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr

"""Others' checkers, which run on node: where make puts them, and how a test calls one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hermes_rl_mcp.paths import install_root

_MODULES = install_root() / ".cache" / "node" / "node_modules"
NODE = _MODULES / ".bin" / "node"
SUITE = _MODULES / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
INSPECTOR = _MODULES / ".bin" / "mcp-inspector"


def need_node() -> None:
    if not (NODE.exists() and SUITE.exists() and INSPECTOR.exists()):
        pytest.skip("make conformance or make inspector installs node and the checkers, where npm is at hand")


def run_node(
    script: Path, arguments: Sequence[str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """With ``folder`` as home and working folder: a checker keeps nothing of this user's and finds nothing of it."""
    environ = {"PATH": f"{NODE.parent}:{os.environ['PATH']}", "HOME": str(folder), "NO_COLOR": "1"}
    return subprocess.run(
        [str(NODE), str(script.resolve()), *arguments],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )

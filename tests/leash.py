"""Ends what a test started by hand when the test run itself ends, also when that is killed.

The programs watch a pipe whose other end this process alone holds (``hermes_rl_mcp.lifeline``). One that does not watch
by itself is started through this file: ``python leash.py MODULE ARGUMENTS``. The session fixture in conftest.py cannot
do this: a killed test run runs no fixtures.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from pathlib import Path

from hermes_rl_mcp import lifeline


@functools.cache
def leash() -> int:
    """Descriptor for ``pass_fds``. The other end stays open as long as this process lives; no child inherits it."""
    read_end, _ = os.pipe()
    return read_end


def leashed(environ: dict[str, str]) -> dict[str, str]:
    """``environ`` with the variable that names the descriptor; one that is there already stays."""
    return {lifeline.VARIABLE: str(leash()), **environ}


def on_leash(module: str, *arguments: str) -> list[str]:
    """For a program that does not watch by itself."""
    return [sys.executable, "-P", str(Path(__file__)), module, *arguments]


if __name__ == "__main__":
    lifeline.watch(os.environ)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

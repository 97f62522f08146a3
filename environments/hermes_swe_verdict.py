"""Runs ``hermes_swe_checker`` on a program in a sandbox of its own and reads what it says."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from environments import hermes_swe_checker
from hermes_rl_mcp.agent.sandbox.task import TaskSandbox


def failure_of(
    files: Mapping[str, bytes],
    tests: str,
    sandbox: TaskSandbox,
    *,
    backend: str,
    timeout_s: float,
    limit_bytes: int,
    entry_point: str = "",
) -> str:
    """Why the tests do not pass; empty if they do. ``files``: the program's, by name. ``sandbox`` must be one that the
    agent never had; it is closed. Raises OSError where it cannot be had."""
    mark = secrets.token_hex(16)
    job = {"folder": "program", "tests": tests, "entry_point": entry_point, "mark": mark}
    python = shlex.quote(sys.executable) if backend == "local" else "python3"
    try:
        place = sandbox()
        for name, data in files.items():
            place.write_bytes(f"program/{name}", data)
        place.write_bytes("checker.py", Path(hermes_swe_checker.__file__).read_bytes())
        done = place.run(
            f"{python} -I -B checker.py", timeout_s=timeout_s, stdin=json.dumps(job).encode(), limit_bytes=limit_bytes
        )
    finally:
        sandbox.close()
    for line in reversed(done.output.decode(errors="replace").splitlines()):
        if mark in line:
            return str(json.loads(line)["failure"])
    return done.error or f"The tests did not come to their end (exit code {done.exit_code})."

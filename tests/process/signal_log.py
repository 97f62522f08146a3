"""Writes down every signal that a process sends, with what is known of the target at that moment.

One to init, to every process, or to itself is written down and not sent.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


class SignalLog:
    """Stands between this process and the three calls that send signals. ``run_id`` is that of a supervisor's run; a
    server has none."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._run_id = run_id

    def install(self) -> None:
        os.kill = self.before(os.kill, pid_of=int)  # type: ignore[assignment]
        os.killpg = self.before(os.killpg, pid_of=int)  # type: ignore[assignment]
        signal.pidfd_send_signal = self.before(signal.pidfd_send_signal, pid_of=_pid_behind)  # type: ignore[assignment]

    def before(self, send: Callable[..., None], pid_of: Callable[[int], int]) -> Callable[..., None]:
        def sending(target: int, sig: int, *rest: Any) -> None:
            pid = pid_of(target)
            forbidden = pid <= 1 or pid in (os.getpid(), os.getpgrp())
            line = {
                "by": self._run_id,
                "pid": pid,
                "signal": int(sig),
                "forbidden": forbidden,
                "target": _describe(pid),
            }
            os.write(self._fd, json.dumps(line).encode() + b"\n")
            if not forbidden:
                send(target, sig, *rest)

        return sending


def _pid_behind(descriptor: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise ValueError(f"descriptor {descriptor} names no process")


def _describe(pid: int) -> dict[str, Any] | None:
    """Marker and command line; None for a process that is gone or a zombie, which no signal can hurt."""
    if pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        return {"marker": process.environ().get("HERMES_RL_RUN_ID", ""), "cmdline": process.cmdline()}
    except psutil.Error:
        return None

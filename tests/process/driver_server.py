"""A server of runs that tests can start, ask and kill: the product's own operations behind JSON lines.

``driver_server.py SIGNAL_LOG [PLANT]``. Each line on stdin is ``{"id", "do": "start" | "stop" | "look", ...}`` and is
carried out in a thread of its own, so that several are under way when the process is killed. A defect of ``plants.py``
may be planted into it before it begins.

Every signal that this process sends is written to SIGNAL_LOG with what is known of the target; one to init, to every
process, or to itself is written down and not sent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import plants
import psutil

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations import starting
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.runs import launch


class SignalLog:
    """Stands between this process and the three calls that send signals."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def install(self) -> None:
        os.kill = self.before(os.kill, pid_of=int)  # type: ignore[assignment]
        os.killpg = self.before(os.killpg, pid_of=int)  # type: ignore[assignment]
        signal.pidfd_send_signal = self.before(signal.pidfd_send_signal, pid_of=_pid_behind)  # type: ignore[assignment]

    def before(self, send: Callable[..., None], pid_of: Callable[[int], int]) -> Callable[..., None]:
        def sending(target: int, sig: int, *rest: Any) -> None:
            pid = pid_of(target)
            forbidden = pid <= 1 or pid in (os.getpid(), os.getpgrp())
            line = {"pid": pid, "signal": int(sig), "forbidden": forbidden, "target": _describe(pid)}
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


class Driver:
    def __init__(self) -> None:
        self._operations = Operations.from_environ(os.environ)
        self._writing = threading.Lock()

    def serve(self) -> None:
        relaunched = anyio.run(starting.relaunch_queued, self._operations.context)
        self.say({"id": 0, "ok": {"relaunched": relaunched}})
        for line in sys.stdin:
            threading.Thread(target=self.carry_out, args=(json.loads(line),), daemon=True).start()

    def carry_out(self, command: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": command["id"]}
        try:
            reply["ok"] = anyio.run(getattr(self, command["do"]), command)
        except HermesRLError as error:
            reply["refused"] = str(error)
        except BaseException as error:  # the test judges it
            logging.exception("%s", command)
            reply["raised"] = f"{type(error).__name__}: {error}"
        self.say(reply)

    def say(self, reply: dict[str, Any]) -> None:
        with self._writing:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()

    async def start(self, command: dict[str, Any]) -> dict[str, Any]:
        request = RunRequest.model_validate(command["request"])
        record = await launch.start(self._operations.context.home, request, {**os.environ, **command["environ"]})
        return {"run_id": record.run_id, "status": record.status.value}

    async def stop(self, command: dict[str, Any]) -> dict[str, Any]:
        answer = await self._operations.stop_training(command["run_id"])
        return {"run_id": answer.run_id, "status": answer.status}

    async def look(self, command: dict[str, Any]) -> dict[str, Any]:
        """As a client looks: the list, then each run by itself."""
        rows = (await self._operations.list_runs()).runs
        shown = {row.run_id: row.status for row in rows}
        for run_id, status in shown.items():
            if status != "unreadable":
                shown[run_id] = (await self._operations.check_status(run_id)).status
        return {"shown": shown}


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    SignalLog(Path(sys.argv[1])).install()
    if len(sys.argv) > 2:
        plants.plant_in_server(sys.argv[2])
    Driver().serve()


if __name__ == "__main__":
    main()

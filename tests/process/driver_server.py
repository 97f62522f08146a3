"""A server of runs that tests can start, ask and kill: the product's own operations behind JSON lines.

``driver_server.py SIGNAL_LOG [PLANT]``. Each line on stdin is ``{"id", "do": "start" | "stop" | "look", ...}`` and is
carried out in a thread of its own, so that several are under way when the process is killed. A defect of ``plants.py``
may be planted into it before it begins.

Every signal that this process or a supervisor of its runs sends is written to SIGNAL_LOG.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import plants
from signal_log import SignalLog

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations import starting
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.runs import launch


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
    signal_log = Path(sys.argv[1])
    SignalLog(signal_log).install()
    plants.plant_in_server(sys.argv[2] if len(sys.argv) > 2 else "", signal_log)
    Driver().serve()


if __name__ == "__main__":
    main()

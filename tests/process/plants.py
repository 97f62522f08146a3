"""Defects that the interleaving test must find, planted from outside into the test's own processes.

``plant_in_server`` changes one function of the product in a driver process. ``plants.py SIGNAL_LOG NAME RUN_DIR ...``
is a supervisor that writes down the signals it sends, with the defect in it unless NAME is empty; a driver starts that
instead of the real one. Nothing shipped knows of this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from signal_log import SignalLog

from hermes_rl_mcp.contracts.runs import RunRecord, RunStatus
from hermes_rl_mcp.files import now, write_atomic
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs import claims, launch, locks, outcome, reconcile
from hermes_rl_mcp.runs.outcome import Verdict
from hermes_rl_mcp.runs.state import RunState, read_record


def completed_by_metrics() -> None:
    """A reader takes a run whose supervisor is gone for completed when its metrics reached the last step."""
    honest = reconcile._close

    def close(paths: RunPaths, state: RunState) -> RunRecord:
        if state.record.status is not RunStatus.QUEUED and outcome.steps_done(paths) >= state.record.total_steps:
            state.move(RunStatus.COMPLETED, "all steps are in the metrics")
            return state.record
        return honest(paths, state)

    reconcile._close = close


def completed_by_exit_code() -> None:
    """The supervisor takes the trainer's exit 0 for completion, without its record."""
    honest = outcome.failure

    def failure(paths: RunPaths, process: Any, exit_code: int, *rest: Any, **further: Any) -> Verdict:
        if process == "trainer" and exit_code == 0:
            return Verdict(RunStatus.COMPLETED, "the trainer exited 0")
        return honest(paths, process, exit_code, *rest, **further)

    outcome.failure = failure


def stop_writes_the_record() -> None:
    """A server that asks for a stop writes ``stopped`` itself, without lock and without comparing revisions."""
    honest = launch.stop

    async def stop(home: Home, run_id: str, reason: str) -> RunRecord:
        paths = home.run(run_id)
        seen = read_record(paths)
        after = await honest(home, run_id, reason)
        if seen.status.terminal:
            return after
        changes = {"status": RunStatus.STOPPED, "ended_at": now(), "revision": seen.revision + 1}
        written = seen.model_copy(update=changes)
        write_atomic(paths.record, written.model_dump_json(indent=1))
        return written

    launch.stop = stop


def reader_ignores_the_lock() -> None:
    """A reader believes every supervisor dead, and its own lock taken."""

    def take(path: Path, *, timeout_s: float = 0.0) -> locks.HeldLock:
        return locks.HeldLock(path, os.open(path, os.O_RDWR | os.O_CREAT))

    reconcile.locks = SimpleNamespace(is_held=lambda path: False, take=take)  # type: ignore[assignment]


def signals_by_pid_alone() -> None:
    """A reader that ends what a lost run left goes by the recorded pids, whoever has them now."""
    honest = reconcile._end_leftovers

    def end_leftovers(paths: RunPaths, record: RunRecord) -> list[Any]:
        for process in record.processes.values():
            if process.identity is not None and process.identity.pid > 1:
                try:
                    os.kill(process.identity.pid, signal.SIGTERM)
                except ProcessLookupError:
                    continue
        return honest(paths, record)

    reconcile._end_leftovers = end_leftovers


def leaves_orphans() -> None:
    """A reader closes a lost run without ending the processes that it left."""
    reconcile._end_leftovers = lambda *_: []


def forgets_the_key() -> None:
    """Starting again with the same idempotency key starts a second run."""
    launch.run_with_key = lambda *_: None


def does_not_queue() -> None:
    """The supervisor takes the device without waiting for who has it."""
    claims.Ticket.ahead = lambda self: []  # type: ignore[method-assign]


IN_SERVER: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        completed_by_metrics,
        stop_writes_the_record,
        reader_ignores_the_lock,
        signals_by_pid_alone,
        leaves_orphans,
        forgets_the_key,
    )
}
IN_SUPERVISOR: dict[str, Callable[[], None]] = {
    plant.__name__: plant for plant in (completed_by_exit_code, does_not_queue)
}


def plant_in_server(name: str, signal_log: Path) -> None:
    """Changes this process and what it starts as supervisors. An empty name plants nothing."""
    assert not name or name in IN_SERVER or name in IN_SUPERVISOR, name
    if name in IN_SERVER:
        IN_SERVER[name]()
    in_supervisor = name if name in IN_SUPERVISOR else ""

    def popen(argv: list[str], **keywords: Any) -> subprocess.Popen[bytes]:
        assert argv[1:4] == ["-P", "-m", "hermes_rl_mcp.runs"], argv
        return subprocess.Popen([argv[0], __file__, str(signal_log), in_supervisor, *argv[4:]], **keywords)

    launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[assignment]


def main() -> None:
    signal_log, plant = Path(sys.argv.pop(1)), sys.argv.pop(1)
    SignalLog(signal_log, run_id=Path(sys.argv[1]).name).install()
    if plant:
        IN_SUPERVISOR[plant]()
    from hermes_rl_mcp.runs.__main__ import main as supervise

    sys.exit(supervise())


if __name__ == "__main__":
    main()

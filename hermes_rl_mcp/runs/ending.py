"""Ends a run: its processes in order, then whatever else descends from it, then its record. Every wait has a bound."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from hermes_rl_mcp.contracts.runs import STOP_ORDER, Identity, ProcessName
from hermes_rl_mcp.paths import PROCESS_LOGS, Home, RunPaths
from hermes_rl_mcp.runs import family, outcome
from hermes_rl_mcp.runs.outcome import Verdict
from hermes_rl_mcp.runs.process import ManagedProcess, end_all, marked
from hermes_rl_mcp.runs.specs import Limits
from hermes_rl_mcp.runs.state import RunState

_log = logging.getLogger(__name__)

_LEFTOVER_TERM_S = 3.0
"""For processes that left their group; nobody waits for a result of theirs."""
_TRY_AGAIN_S = 0.5


async def stop_processes(
    state: RunState,
    processes: Mapping[ProcessName, ManagedProcess],
    limits: Limits,
    trainer_has_completed: Callable[[], bool],
) -> list[int]:
    """Environment, trainer, rollout API. Returns the pids of those that would not go.

    Whether the trainer has completed is asked right before it is signalled: then it has nothing left to save.
    """
    stuck: list[int] = []
    for name in STOP_ORDER:
        process = processes.get(name)
        if process is None:
            continue
        state.update(detail=f"stopping the {outcome.TITLES[name]}")
        patient = name != "trainer" or not trainer_has_completed()
        term_s = limits.term_s(name) if patient else limits.kill_s
        gone = await process.stop(term_s=term_s, kill_s=limits.kill_s)
        if process.exit_code is not None:
            state.update_process(name, exit_code=process.exit_code, forced=process.forced)
        if gone:
            process.reap()
        else:
            stuck.append(process.identity.pid)
    return stuck


async def end_leftovers(own_marker: str, spared: list[int], limits: Limits) -> list[int]:
    """Whatever left its group: known by the run's marker, or because it descends from this process. Returns the pids of
    those that would not go; ``spared`` are known already."""
    found = await to_thread.run_sync(_leftovers, own_marker, spared)
    if not found:
        return []
    _log.warning("ending processes that left their group: %s", [one.pid for one in found])
    await to_thread.run_sync(lambda: end_all(found, term_s=_LEFTOVER_TERM_S, kill_s=limits.kill_s))
    return [one.pid for one in await to_thread.run_sync(_leftovers, own_marker, spared)]


async def close(state: RunState, verdict: Verdict, limits: Limits, **changes: Any) -> None:
    """Writes how the run ended, if need be again and again for ``full_disk_s``; then OSError."""
    deadline = time.monotonic() + limits.full_disk_s
    while True:
        try:
            state.move(verdict.status, verdict.reason, error=verdict.error, hint=verdict.hint, **changes)
            return
        except OSError as error:
            _log.error("run %s: its end cannot be written: %s", state.record.run_id, error)
            if time.monotonic() >= deadline:
                raise
        await anyio.sleep(_TRY_AGAIN_S)


def disk_bytes(home: Home, paths: RunPaths) -> int:
    """What the run takes on disk: its directory and its logs."""
    logs = [found for name in PROCESS_LOGS for found in home.logs.glob(home.log(name, paths.run_id).name + "*")]
    inside = [Path(folder, name) for folder, _, names in os.walk(paths.dir) for name in names]
    return sum(_allocated(path) for path in (*inside, *logs) if path != paths.reserve)


def _leftovers(own_marker: str, spared: list[int]) -> list[Identity]:
    found = {one.pid: one for one in (*marked(own_marker), *family.descendants())}
    return [one for pid, one in found.items() if pid not in spared]


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0

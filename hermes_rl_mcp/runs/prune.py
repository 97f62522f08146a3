"""Deletes old runs, by age and by the room that all runs take: directory, logs, last status check.

Invariant: a run is deleted only by a holder of its lock who has seen its terminal record under that lock. So a live
run, one that is being started or relaunched, and one whose checkpoint is being copied into a continuation stay; so
does what cannot be read. A directory leaves its place by one rename before anything in it is deleted, so no reader ever
meets half a run. Links are deleted, not followed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import PROCESS_LOGS, Home
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.process import is_alive
from hermes_rl_mcp.runs.state import UnreadableRecordError, read_record
from hermes_rl_mcp.runs.store import RunStore

_log = logging.getLogger(__name__)

_GOING = re.compile(r"\.gone-([0-9a-f]{8})\Z")
"""Directory of a run that is being deleted."""
_BLOCK = 512
"""Unit of ``st_blocks``."""


class Item(NamedTuple):
    """One run and the room it takes."""

    run_id: str
    status: str
    environment: str
    ended: float
    """Seconds since the epoch; for a run that cannot be read, when its directory last changed."""
    size_bytes: int
    kept_because: str
    """Why it is not to be deleted, whatever its age; empty if it may be."""


class Plan(NamedTuple):
    """What would be deleted, oldest first, and all there is."""

    going: list[Item]
    everything: list[Item]

    @property
    def left_bytes(self) -> int:
        return sum(item.size_bytes for item in self.everything) - sum(item.size_bytes for item in self.going)


class Outcome(NamedTuple):
    """Of one run. ``problem`` is empty if it is gone."""

    item: Item
    problem: str


def survey(home: Home) -> list[Item]:
    """All runs, those that ended longest ago first."""
    found = RunStore(home).list()
    continued = {
        run.resumed_from for run in found if isinstance(run, RunRecord) and not run.status.terminal and run.resumed_from
    }
    items = []
    for run in found:
        size = sum(map(_disk_bytes, _places(home, run.run_id)))
        if isinstance(run, RunRecord):
            why = _reason(run)
            if not why and run.run_id in continued:
                why = "a run that goes on continues it"
            items.append(Item(run.run_id, run.status.value, run.environment, _ended(home, run), size, why))
        else:
            items.append(Item(run.run_id, run.label, "", _changed(home, run.run_id), size, run.reason))
    return sorted(items, key=lambda item: (item.ended, item.run_id))


def plan(items: Iterable[Item], *, older_than: float | None = None, max_bytes: int | None = None) -> Plan:
    """Runs that ended before ``older_than`` (seconds since the epoch), and beyond those the oldest ones until what is
    left takes at most ``max_bytes``, or nothing more may go."""
    everything = list(items)
    total = sum(item.size_bytes for item in everything)
    going = []
    for item in everything:
        old = older_than is not None and item.ended < older_than
        too_much = max_bytes is not None and total > max_bytes
        if (old or too_much) and not item.kept_because:
            going.append(item)
            total -= item.size_bytes
    return Plan(going, everything)


@contextmanager
def alone(home: Home) -> Iterator[None]:
    """One process at a time deletes; it first ends the deletions of one that was killed in the middle of them."""
    if not home.runs.is_dir():
        yield
        return
    lock = locks.take(home.runs / ".prune.lock")
    if lock is None:
        raise PreflightError("Another process is deleting runs in this home.", hint="Wait until it is done.")
    try:
        for name in os.listdir(home.runs):
            if found := _GOING.match(name):
                try:
                    _erase(home, found[1], home.runs / name)
                except OSError as error:
                    _log.warning("what is left of run %s cannot be deleted: %s", found[1], error)
        yield
    finally:
        lock.release()


def delete(home: Home, items: Iterable[Item]) -> Iterator[Outcome]:
    """One after the other; what changed since the survey is looked at again. To be called ``alone``."""
    for item in items:
        try:
            problem = _delete(home, item.run_id)
        except OSError as error:
            problem = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        yield Outcome(item, problem)


def _delete(home: Home, run_id: str) -> str:
    paths = home.run(run_id)
    try:
        lock = locks.take(paths.supervisor_lock)
    except FileNotFoundError:
        return "gone already"
    if lock is None:
        return "in use"
    try:
        try:
            record = read_record(paths)
        except UnreadableRecordError as error:
            return str(error)
        if why := _reason(record):
            return why
        going = home.runs / f".gone-{run_id}"
        paths.dir.rename(going)
        _erase(home, run_id, going)
        return ""
    finally:
        lock.release()


def _erase(home: Home, run_id: str, going: Path) -> None:
    for path in _beside(home, run_id):
        path.unlink(missing_ok=True)
    shutil.rmtree(going)
    _log.info("run %s was deleted", run_id)


def _reason(record: RunRecord) -> str:
    if not record.status.terminal:
        return "it goes on"
    identities = [process.identity for process in record.processes.values()]
    alive = [one.pid for one in identities if one is not None and is_alive(one)]
    return f"processes of it are alive: {', '.join(map(str, alive))}" if alive else ""


def _ended(home: Home, record: RunRecord) -> float:
    try:
        return datetime.fromisoformat(record.ended_at or record.created_at).timestamp()
    except ValueError:
        return _changed(home, record.run_id)


def _changed(home: Home, run_id: str) -> float:
    try:
        return home.run(run_id).dir.lstat().st_mtime
    except OSError:
        return datetime.now(UTC).timestamp()


def _places(home: Home, run_id: str) -> list[Path]:
    return [home.run(run_id).dir, *_beside(home, run_id)]


def _beside(home: Home, run_id: str) -> list[Path]:
    """Files of the run outside of its directory."""
    logs = [home.log(process, run_id) for process in PROCESS_LOGS]
    return [*logs, *(log.with_name(log.name + ".1") for log in logs), home.checks / f"{run_id}.json"]


def _disk_bytes(path: Path) -> int:
    """What a file, or a folder with all in it, takes on disk. Whatever vanishes meanwhile takes nothing."""
    total = 0
    waiting = [path]
    while waiting:
        here = waiting.pop()
        try:
            found = here.lstat()
            total += found.st_blocks * _BLOCK
            if os.path.isdir(here) and not os.path.islink(here):
                waiting.extend(Path(entry.path) for entry in os.scandir(here))
        except OSError:
            continue
    return total

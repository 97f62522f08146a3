"""The processes of a run and whatever descends from them: what they are doing, and that none gets away unseen.

A supervisor adopts the orphans among its descendants, so even one that left its group, its session and the run's marker
behind stays below it in the process tree. Reads the kernel's tables only; signals nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psutil

from hermes_rl_mcp.contracts.runs import Identity, ProcessName
from hermes_rl_mcp.runs.process import identity_of, is_alive

_PR_SET_CHILD_SUBREAPER = 36


class Sight(NamedTuple):
    """One process, as the kernel shows it. None = gone."""

    state: str | None
    memory_bytes: int | None
    """Resident set, its descendants included."""


class Family(NamedTuple):
    """One look at the processes of a run."""

    members: dict[ProcessName, Sight]
    memory_bytes: int
    """Of all of them, and of adopted orphans."""
    dead: list[int]
    """Children of this process that have ended and that nobody has waited for."""


def adopt_orphans() -> bool:
    """From now on descendants whose parent dies become children of this process. Whether the system can do that."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return int(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def look(identities: Mapping[ProcessName, Identity]) -> Family:
    """Takes some milliseconds, more on a machine with very many processes."""
    children = _children()
    members = {
        name: _sight(identity, children) if is_alive(identity) else Sight(None, None)
        for name, identity in identities.items()
    }
    below = list(_below(os.getpid(), children))
    dead = [one.pid for one in children.get(os.getpid(), ()) if _state(one) == psutil.STATUS_ZOMBIE]
    return Family(members, sum(map(_memory, below)), dead)


def descendants() -> list[Identity]:
    """All live processes below this one."""
    found = [identity_of(process.pid) for process in _below(os.getpid(), _children())]
    return [one for one in found if one is not None and is_alive(one)]


def _children() -> dict[int, list[psutil.Process]]:
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            found.setdefault(process.ppid(), []).append(process)
        except psutil.Error:
            continue  # gone
    return found


def _below(pid: int, children: Mapping[int, list[psutil.Process]]) -> Iterator[psutil.Process]:
    seen = {pid}
    left = [pid]
    while left:
        for process in children.get(left.pop(), ()):
            if process.pid not in seen:
                seen.add(process.pid)
                left.append(process.pid)
                yield process


def _sight(identity: Identity, children: Mapping[int, list[psutil.Process]]) -> Sight:
    try:
        process = psutil.Process(identity.pid)
        memory = _memory(process) + sum(map(_memory, _below(identity.pid, children)))
        return Sight(str(process.status()), memory)
    except psutil.Error:
        return Sight(None, None)


def _state(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0

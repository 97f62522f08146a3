"""The kernel's own count of out-of-memory kills: evidence for why a process was killed that nobody of us signalled.

Counters only ever rise, so what counts is a difference. A counter that cannot be read counts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_KEY = "oom_kill"


class OomKills(NamedTuple):
    """Since the counters began. A kill within the control group is one of the machine's, too."""

    machine: int = 0
    group: int = 0
    """In this process's control group, which its children share: its memory limit, or the machine's, was reached."""

    def since(self, before: OomKills) -> OomKills:
        return OomKills(self.machine - before.machine, self.group - before.group)

    @property
    def words(self) -> str:
        """``the kernel counted 1 out-of-memory kill meanwhile, 1 of it in the run's control group``; else empty."""
        count = max(self.machine, self.group)
        if count <= 0:
            return ""
        kills = "1 out-of-memory kill" if count == 1 else f"{count} out-of-memory kills"
        return f"the kernel counted {kills} meanwhile, {max(0, self.group)} in the run's own control group"


def count(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> OomKills:
    """As of now, for the calling process."""
    group = sum(_value(path) for path in _group_files(proc, cgroups))
    return OomKills(_value(proc / "vmstat"), group)


def _group_files(proc: Path, cgroups: Path) -> list[Path]:
    """Where the two generations of control groups keep the count; only one of them has it."""
    found = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(cgroups / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(cgroups / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _value(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == _KEY and value.strip().isdigit():
            return int(value)
    return 0

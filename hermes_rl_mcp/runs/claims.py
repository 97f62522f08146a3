"""Claims that hold for all servers and homes of one user on this machine: devices, first come first served, and ports.

A device is claimed by a ticket, a locked file. The lowest locked ticket has the device; a ticket whose lock is free is
dead, whoever made it. The trainer inherits its ticket's descriptor, so the device stays claimed until it is gone too,
even if its supervisor was killed. A port is claimed by binding it; the bound socket is handed to the child.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.runs import locks

_TICKET = re.compile(r"^(\d{12})-([0-9a-f]{8})$")
_PROBE_S = 1.0
"""A reader that probes a ticket holds it for an instant."""
_LOCK_TIMEOUT_S = 10.0
"""The queue's lock is held for a directory listing; longer means that its file system does not let go of it."""
_PORT_STEP = 2
"""Ports come in pairs (8000 and 8001); the next run tries 8002 and 8003."""
_PORT_TRIES = 100


@dataclass(frozen=True)
class Ticket:
    """A place in the queue of one device. Held from ``take_ticket`` to ``release`` or death."""

    number: int
    run_id: str
    lock: locks.HeldLock

    def ahead(self) -> list[str]:
        """Run ids that have or will have the device before us, in order; empty = it is ours."""
        return [run_id for number, run_id in _live(self.lock.path.parent) if number < self.number]

    def release(self) -> None:
        """Lets go of our descriptor. The file stays: a trainer that would not die still holds it, and the device."""
        self.lock.release()


def take_ticket(claims_dir: Path, device: str, run_id: str) -> Ticket:
    """Queues up for ``device``."""
    secure_dir(claims_dir)
    queue = claims_dir / f"device-{device}"
    secure_dir(queue)
    with locks.holding(queue / "lock", timeout_s=_LOCK_TIMEOUT_S):
        number = 1 + max((number for number, _ in _all(queue)), default=0)
        _clear_dead(queue)
        path = queue / f"{number:012d}-{run_id}"
        lock = locks.take(path, timeout_s=_PROBE_S)
    if lock is None:
        raise PreflightError(f"The claim {path} could not be locked.", hint="Set HERMES_RL_CLAIMS_DIR to a local disk.")
    return Ticket(number, run_id, lock)


def holder(claims_dir: Path, device: str) -> str | None:
    """Run id that has the device now."""
    live = _live(claims_dir / f"device-{device}")
    return live[0][1] if live else None


def in_line(claims_dir: Path, device: str) -> list[str]:
    """Run ids that have or wait for the device now, in order: a run that started now would come behind them."""
    return [run_id for _, run_id in _live(claims_dir / f"device-{device}")]


def bind_loopback(preferred: int) -> socket.socket:
    """A TCP socket bound to 127.0.0.1, not yet listening: ``preferred`` if free, else the next free port.

    Without SO_REUSEADDR, so that no other program can bind it as well before our child listens.
    """
    for port in [*range(preferred, preferred + _PORT_STEP * _PORT_TRIES, _PORT_STEP), 0]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            return sock
    raise PreflightError("No free TCP port on 127.0.0.1.", hint="Close programs that hold many local ports.")


def secure_dir(path: Path) -> None:
    """Creates a folder of ours alone, or checks that it is one: the temp folder is shared with other users."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PreflightError(
            f"The claims folder {path} is not private: owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}.",
            hint=f"It must belong to user {os.getuid()} with mode 700. Remove it, or set HERMES_RL_CLAIMS_DIR.",
        )


def _all(queue: Path) -> list[tuple[int, str]]:
    names = os.listdir(queue) if queue.is_dir() else []
    return sorted((int(found[1]), found[2]) for name in names if (found := _TICKET.match(name)))


def _live(queue: Path) -> list[tuple[int, str]]:
    return [(number, run_id) for number, run_id in _all(queue) if locks.is_held(queue / f"{number:012d}-{run_id}")]


def _clear_dead(queue: Path) -> None:
    for number, run_id in _all(queue):
        path = queue / f"{number:012d}-{run_id}"
        if not locks.is_held(path):
            path.unlink(missing_ok=True)

"""One child process in a session of its own, and signals that only ever reach the process they are meant for.

A process is named by pid, kernel start time and boot; that triple is compared again before every signal, and a
mismatch, pid 0 or 1, and our own group are never signalled. A child that ended stays a zombie until ``reap``, so its
number, which is also its group's, cannot pass to a stranger in between. Knows nothing of training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil

from hermes_rl_mcp.contracts.runs import Identity, ProcessName
from hermes_rl_mcp.files import private

MARKER = "HERMES_RL_RUN_ID"
"""Variable that all processes of a run carry and their descendants inherit, also those that left the group."""
_POLL_S = 0.05


def boot_id() -> str:
    """Changes with every boot of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def identity_of(pid: int) -> Identity | None:
    """Who has this pid now (also as a zombie); None if nobody has."""
    seen = _look(pid)
    return None if seen is None else Identity(pid=pid, started_at=seen[0], boot_id=boot_id())


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still runs. A zombie does not."""
    seen = _look(identity.pid)
    return seen is not None and not seen[1] and seen[0] == identity.started_at and identity.boot_id == boot_id()


def signal_process(identity: Identity, sig: signal.Signals) -> bool:
    """Signals exactly this process; False, and nothing is sent, if it is gone or not ours to signal.

    Where the kernel has process descriptors, the check holds until the signal is sent: a descriptor never passes to
    the next owner of the number.
    """
    if not hasattr(os, "pidfd_open"):
        return _send(identity, sig, os.kill)
    if identity.pid <= 1:
        return False
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:  # gone, or a kernel without
        return _send(identity, sig, os.kill)
    try:
        return _send(identity, sig, lambda _, signum: signal.pidfd_send_signal(descriptor, signum))
    finally:
        os.close(descriptor)


def signal_group(identity: Identity, sig: signal.Signals) -> bool:
    """Signals the process group that this process leads; same refusals."""
    return _send(identity, sig, os.killpg)


def marked(value: str) -> list[Identity]:
    """Live processes that carry ``MARKER=value``, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            carries = process.environ().get(MARKER) == value
        except (psutil.Error, OSError):
            continue  # gone, a zombie, or another user's
        if carries and process.pid != os.getpid() and (identity := identity_of(process.pid)) and is_alive(identity):
            found.append(identity)
    return found


def end_all(identities: Sequence[Identity], *, term_s: float, kill_s: float) -> list[Identity]:
    """TERM to each, a bounded wait, KILL to the rest, a bounded wait. Returns those that still live.

    A process that must not be signalled (see ``may_signal``) is returned without waiting for it.
    """
    alive = [one for one in identities if is_alive(one)]
    left = [one for one in alive if may_signal(one)]
    spared = [one for one in alive if one not in left]
    for sig, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for one in left:
            signal_process(one, sig)
        deadline = time.monotonic() + wait_s
        while (left := [one for one in left if is_alive(one)]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return [*left, *spared]


def may_signal(identity: Identity) -> bool:
    """Whether this pid still is this process, and neither init, every process, nor ourselves or our group."""
    return (
        identity.pid > 1 and identity.pid not in (os.getpid(), os.getpgrp()) and identity_of(identity.pid) == identity
    )


def _send(identity: Identity, sig: signal.Signals, send: Callable[[int, int], None]) -> bool:
    if not may_signal(identity):
        return False
    try:
        send(identity.pid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _look(pid: int) -> tuple[float, bool] | None:
    """(start time, is a zombie). On Linux seconds since boot: those do not move when the clock is set."""
    if pid <= 0:
        return None
    try:
        if not psutil.LINUX:
            process = psutil.Process(pid)
            return process.create_time(), process.status() == psutil.STATUS_ZOMBIE
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK"), fields[0] in (b"Z", b"X")
    except (OSError, IndexError, psutil.Error):
        return None


@dataclass(frozen=True)
class ProcessSpec:
    """All it takes to start one child. ``environ`` is the whole environment, not an addition."""

    name: ProcessName
    argv: tuple[str, ...]
    environ: dict[str, str] = field(repr=False)  # may hold keys
    log: Path
    cwd: Path
    pass_fds: tuple[int, ...] = ()


class ManagedProcess:
    """A child that this process started. Its output goes to the end of its log file; it reads nothing."""

    def __init__(self, spec: ProcessSpec, popen: subprocess.Popen[bytes], identity: Identity) -> None:
        self.spec = spec
        self.identity = identity
        self.exit_code: int | None = None
        """Negative: killed by that signal."""
        self.forced = False
        """``stop`` found it running."""
        self._popen = popen

    @classmethod
    def spawn(cls, spec: ProcessSpec) -> ManagedProcess:
        """Starts it as leader of a new session and group. OSError if the program cannot be started."""
        with open(spec.log, "ab", buffering=0, opener=private) as log:
            popen = subprocess.Popen(
                spec.argv,
                env=spec.environ,
                cwd=spec.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=spec.pass_fds,
            )
        identity = identity_of(popen.pid)  # cannot have vanished: we have not reaped it
        assert identity is not None
        return cls(spec, popen, identity)

    def poll(self) -> int | None:
        """Exit code once it ended, leaving the zombie in place."""
        if self.exit_code is None:
            if hasattr(os, "waitid"):
                result = os.waitid(os.P_PID, self.identity.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if result is not None:
                    self.exit_code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            else:  # macOS: the number may pass on, but identities are compared before each signal
                self.exit_code = self._popen.poll()
        return self.exit_code

    async def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel sends no event for it
            await anyio.sleep(_POLL_S)
        return self.exit_code

    async def stop(self, *, term_s: float, kill_s: float) -> bool:
        """Ends it and all that is left of its group, with bounds. False if something would not go."""
        for sig, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            if self._gone():
                return True
            self.forced = self.forced or self.poll() is None
            signal_group(self.identity, sig)
            deadline = time.monotonic() + wait_s
            while not self._gone() and time.monotonic() < deadline:  # noqa: ASYNC110 - as in wait
                await anyio.sleep(_POLL_S)
        return self._gone()

    def reap(self) -> None:
        """Takes the exit status from the kernel; its number is free from then on. Only after it ended."""
        self._popen.wait(timeout=1)

    def _gone(self) -> bool:
        return self.poll() is not None and not _has_group_members(self.identity.pid)


def _has_group_members(group: int) -> bool:
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group and (seen := _look(pid)) and not seen[1]:
                return True
        except (ProcessLookupError, PermissionError):
            continue
    return False

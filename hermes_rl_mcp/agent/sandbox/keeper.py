"""The process below which all commands of one local sandbox run:
``python -I -S keeper.py SOCKET_FD FOLDER PROCESSES DISK_BYTES``.

Invariant: no process of the sandbox outlives this one, and this one does not outlive its parent. It adopts orphans, so
what left its group and session is still found below it; the end of the socket, however it comes, is the order to end.
A sandbox that has more processes, or more on disk, than it may is emptied of processes, and its commands are told why.
Standard library only: one starts for each rollout.

Requests: eight bytes of length with the descriptors, then JSON. ``start`` comes with stdin, stdout, stderr and a pipe
to which lines of JSON go: ``{"pid"}`` or ``{"error"}``, then ``{"exit"}``. ``kill`` and ``close`` come with that pipe.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import termios
import time
from contextlib import suppress
from typing import Any

HEADER_BYTES = 8
_PR_SET_CHILD_SUBREAPER = 36
_MAX_FDS = 4
_END_S = 10.0
"""Killing goes on so long while new processes keep coming; a fork bomb loses within milliseconds."""
_LOOK_S = 0.2
"""Between two looks at what the sandbox has become, while anything runs."""
_DISK_LOOK_S = 1.0
_DISK_SHARE = 20
"""Measuring the folder takes at most one part in so many of the time."""


def serve(sock: socket.socket, bounds: Bounds) -> None:
    """Until the socket ends or SIGTERM comes; then nothing is left of the sandbox."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with suppress(OSError):  # root only, whom no limit on processes binds: ahead of whatever the sandbox starts
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    waking, woken = os.pipe()
    for fd in (waking, woken):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands: dict[int, tuple[int, int]] = {}  # pid -> (number of the command, its pipe)
    poll = select.poll()  # unlike select, for descriptors of any number
    for one in (sock.fileno(), waking):
        poll.register(one, select.POLLIN)
    done = -1
    while done < 0:
        ready = [fd for fd, _ in poll.poll(_LOOK_S * 1000 if _reap(commands) else None)]
        if waking in ready and signal.SIGTERM in os.read(waking, 4096):
            break
        if _reap(commands) and (reason := bounds.exceeded()):
            _empty(commands, reason)
        if sock.fileno() in ready:
            request, fds = _request(sock)
            match request.get("do"):
                case "start":
                    _start(request, fds, commands)
                case "kill":
                    _end_command(request["number"], request["pid"], commands)
                    _close(fds)
                case "close":
                    done = fds[0]
                case _:
                    break
    _end_all(commands)
    if done < 0:  # nobody is left to do it
        shutil.rmtree(bounds.folder, ignore_errors=True)
    else:
        _tell(done, {"closed": True})


class Bounds:
    """What the whole sandbox may have."""

    def __init__(self, folder: str, processes: int, disk_bytes: int) -> None:
        self.folder = folder
        self._processes = processes
        self._disk_bytes = disk_bytes
        self._look_at = 0.0
        self._disk_look_at = time.monotonic() + _DISK_LOOK_S

    def exceeded(self) -> str | None:
        """Which of them does not hold."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + _LOOK_S
        if len(_below([os.getpid()])) > self._processes:
            return f"The sandbox had more than {self._processes} processes; all of them were ended."
        if now >= self._disk_look_at and (used := self._used()) > self._disk_bytes:
            return f"The sandbox holds {used} bytes, more than {self._disk_bytes}; all its processes were ended."
        return None

    def _used(self) -> int:
        begun = time.monotonic()
        used = 0
        for parent, _, names in os.walk(self.folder):
            for name in names:
                with suppress(OSError):
                    used += os.lstat(os.path.join(parent, name)).st_blocks * 512
        now = time.monotonic()
        self._disk_look_at = now + max(_DISK_LOOK_S, (now - begun) * _DISK_SHARE)
        return used


def _request(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        header, fds, _, _ = socket.recv_fds(sock, HEADER_BYTES, _MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # a command that held another's pipe would hide its end
        while 0 < len(header) < HEADER_BYTES and (more := sock.recv(HEADER_BYTES - len(header))):
            header += more
        body = b""
        size = int.from_bytes(header, "big")
        while len(body) < size and (more := sock.recv(min(size - len(body), 1 << 20))):  # the next one may be waiting
            body += more
        found = json.loads(body or b"{}")
    except (OSError, ValueError):
        return {}, []
    return found, fds


def _start(request: dict[str, Any], fds: list[int], commands: dict[int, tuple[int, int]]) -> None:
    *streams, pipe = fds
    failed, failing = os.pipe()  # closed by exec
    try:
        pid = os.fork()
    except OSError as error:
        _tell(pipe, {"error": f"{error.strerror}"})
        _close([*fds, failed, failing])
        return
    if pid == 0:
        try:
            _become(request, streams)
        except (OSError, ValueError) as error:
            with suppress(OSError):
                os.write(failing, str(error).encode(errors="replace"))
        finally:
            os._exit(127)
    _close([*streams, failing])
    said = b""
    while more := os.read(failed, 4096):
        said += more
    os.close(failed)
    if said:
        os.waitpid(pid, 0)
        _tell(pipe, {"error": said.decode(errors="replace")})
        os.close(pipe)
        return
    commands[pid] = (request["number"], pipe)
    _tell(pipe, {"pid": pid})


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """In the child: never returns but by an error."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    for target, stream in enumerate(streams):
        os.dup2(stream, target, inheritable=True)
    if request.get("pty"):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for name, value in request.get("limits", {}).items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    _bound_processes(request["processes"])
    os.chdir(request["workdir"])
    os.execvpe(request["argv"][0], request["argv"], request["environ"])


def _bound_processes(more: int) -> None:
    """The kernel counts all of this user's tasks; a bomb meets its limit before the keeper has looked."""
    try:
        with open("/proc/loadavg") as file:
            running = int(file.read().split("/")[1].split()[0])
    except (OSError, ValueError, IndexError):
        return
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    value = running + 4 * more
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (value, value))


def _reap(commands: dict[int, tuple[int, int]]) -> bool:
    """Takes what has ended; whether any child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid in commands:
            pipe = commands.pop(pid)[1]
            _tell(pipe, {"exit": os.waitstatus_to_exitcode(status)})
            os.close(pipe)


def _empty(commands: dict[int, tuple[int, int]], reason: str) -> None:
    for _, pipe in commands.values():
        _tell(pipe, {"error": reason})
        os.close(pipe)
    commands.clear()
    _end_all(commands)


def _end_all(commands: dict[int, tuple[int, int]]) -> None:
    deadline = time.monotonic() + _END_S
    while _reap(commands) and time.monotonic() < deadline:
        _end(_below([os.getpid()]))
        time.sleep(0.001)


def _end_command(number: int, pid: int, commands: dict[int, tuple[int, int]]) -> None:
    """Until nothing is found any more: what was just being forked is not in the first look."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        is_running = any(one == number for one, _ in commands.values())
        pids = _of_command(pid, is_running=is_running)
        if not pids:
            return
        _end(pids)
        _reap(commands)
        time.sleep(0.001)


def _of_command(pid: int, *, is_running: bool) -> list[int]:
    """What a command started: below it, and what stayed in its session when its parent had ended."""
    adopted = [one for one in _below([os.getpid()]) if _session(one) == pid]
    return list({*adopted, *_below(adopted), *([pid, *_below([pid])] if is_running else [])})


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _below(pids: list[int]) -> list[int]:
    found: dict[int, None] = {}
    left = list(pids)
    while left:
        fresh = [child for child in _children(left.pop()) if child not in found]
        found.update(dict.fromkeys(fresh))
        left += fresh
    return list(found)


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            children += [int(word) for word in file.read().split()]
    return children


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _tell(pipe: int, message: dict[str, Any]) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(pipe, json.dumps(message).encode() + b"\n")


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.set_inheritable(int(sys.argv[1]), False)
    serve(socket.socket(fileno=int(sys.argv[1])), Bounds(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

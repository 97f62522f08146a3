"""The process below which all commands of one local sandbox run: ``python -I -S keeper.py SOCKET_FD FOLDER``.

Invariant: no process of the sandbox outlives this one, and this one does not outlive its parent. It adopts orphans, so
what left its group and session is still found below it; the end of the socket, however it comes, is the order to end.
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


def serve(sock: socket.socket, folder: str) -> None:
    """Until the socket ends or SIGTERM comes; then nothing is left of the sandbox."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    waking, woken = os.pipe()
    for fd in (waking, woken):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands: dict[int, tuple[int, int]] = {}  # pid -> (number of the command, its pipe)
    done = -1
    while done < 0:
        ready, _, _ = select.select([sock, waking], [], [])
        if waking in ready and signal.SIGTERM in os.read(waking, 4096):
            break
        _reap(commands)
        if sock in ready:
            request, fds = _request(sock)
            match request.get("do"):
                case "start":
                    _start(request, fds, commands)
                case "kill":
                    pids = [pid for pid, (number, _) in commands.items() if number == request["number"]]
                    _end(_of_command(request["pid"], is_running=bool(pids)))
                    _close(fds)
                case "close":
                    done = fds[0]
                case _:
                    break
    _end_all(commands)
    if done < 0:  # nobody is left to do it
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _tell(done, {"closed": True})


def _request(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        header, fds, _, _ = socket.recv_fds(sock, HEADER_BYTES, _MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # a command that held another's pipe would hide its end
        while 0 < len(header) < HEADER_BYTES and (more := sock.recv(HEADER_BYTES - len(header))):
            header += more
        body = b""
        while len(body) < int.from_bytes(header, "big") and (more := sock.recv(1 << 20)):
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
    os.chdir(request["workdir"])
    os.execvpe(request["argv"][0], request["argv"], request["environ"])


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


def _end_all(commands: dict[int, tuple[int, int]]) -> None:
    deadline = time.monotonic() + _END_S
    while _reap(commands) and time.monotonic() < deadline:
        _end(_below([os.getpid()]))
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
    found: list[int] = []
    left = list(pids)
    while left:
        for child in _children(left.pop()):
            if child not in found:
                found.append(child)
                left.append(child)
    return found


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
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])

"""A sandbox on this machine: a private folder, processes with limits and an environment without keys.

Invariant: after ``close``, and after the death of this process however it dies, neither a process nor a file of the
folder is left. It keeps tasks apart and tidy; it does not keep a hostile program from reading what this user can read
or from the network: use docker for that.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import psutil

from hermes_rl_mcp.agent.interfaces import BackgroundProcess, CommandResult
from hermes_rl_mcp.agent.sandbox import keeper
from hermes_rl_mcp.agent.sandbox.command import GONE, LocalProcess, Status

MARKER = "HERMES_RL_SANDBOX"
"""Variable that the processes of a sandbox carry."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TERM", "HERMES_RL_RUN_ID", "HERMES_RL_TEST_MARK")
"""No key and no address of ours; the last two let a run, or a test, find what is left of it."""
_LONGEST_ARGUMENT = 100_000
"""Bytes; Linux refuses arguments of 128 KiB."""
_CLOSE_S = 15.0
_LOOK_S = 0.5


@dataclass(frozen=True)
class Limits:
    """The first three are the kernel's, for each process; the others are looked at while commands run."""

    memory_bytes: int = 4 * 2**30
    """Of data (RLIMIT_DATA)."""
    file_bytes: int = 2**30
    open_files: int = 1024
    output_bytes: int = 64 * 2**20
    """A command in the foreground that writes more is ended."""
    processes: int = 512
    """Of the whole sandbox; when there are more all of them are ended."""
    disk_bytes: int = 8 * 2**30
    """Of all its files together; the same."""

    def for_kernel(self) -> dict[str, int]:
        return {
            "RLIMIT_DATA": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


class LocalSandbox:
    """``interfaces.Sandbox`` on this machine. Thread-safe. ``root`` is where its folder is made; None = TMPDIR."""

    def __init__(
        self,
        task_id: str = "",
        *,
        root: Path | None = None,
        limits: Limits | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.task_id = task_id or uuid.uuid4().hex
        self.limits = limits or Limits()
        self._folder = Path(tempfile.mkdtemp(prefix="hermes-rl-sandbox-", dir=root)).resolve()  # 0700
        self.workdir = str(self._folder / "home")
        self.tmpdir = str(self._folder / "tmp")
        self._outputs = self._folder / "outputs"
        self._environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._environ |= {"HOME": self.workdir, "TMPDIR": self.tmpdir, "PWD": self.workdir, MARKER: self._folder.name}
        self._environ |= environ
        self._shell = shutil.which("bash") or "/bin/sh"
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._count = 0
        self._is_closed = False
        self._background: list[LocalProcess] = []
        self._make_folders()

    def run(
        self,
        command: str,
        *,
        timeout_s: float,
        workdir: str | None = None,
        stdin: bytes | None = None,
        environ: Mapping[str, str] | None = None,
        limit_bytes: int | None = None,
    ) -> CommandResult:
        """See ``interfaces.Sandbox``. What it put into the background goes on until ``close``."""
        try:
            self._make_folders()
            with tempfile.TemporaryFile(dir=self._outputs) as given:
                given.write(stdin or b"")
                given.seek(0)
                status, output, number = self._start(command, workdir, given.fileno(), environ or {})
        except OSError as error:
            return CommandResult(b"", -1, str(error))
        try:
            return self._finish(status, output, number, timeout_s, limit_bytes)
        finally:
            status.close()
            with suppress(OSError):
                output.unlink(missing_ok=True)

    def start(self, command: str, *, workdir: str | None = None, pty: bool = False) -> LocalProcess:
        """See ``interfaces.Sandbox``. Raises OSError if it cannot be started."""
        reading, writing = _terminal() if pty else os.pipe()
        os.set_blocking(writing, False)
        try:
            status, output, number = self._start(command, workdir, reading, {}, is_terminal=pty)
        except OSError:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        process = LocalProcess(
            f"proc_{uuid.uuid4().hex[:12]}", command, status, output, writing, lambda: self._kill(number, status)
        )
        if pty:
            told = (os.dup(writing), output, self.limits.output_bytes)
            threading.Thread(target=_pump, args=told, name="sandbox-pty", daemon=True).start()
        with self._lock:
            self._background.append(process)
        return process

    def processes(self) -> list[BackgroundProcess]:
        with self._lock:
            return list(self._background)

    def read_bytes(self, path: str) -> bytes:
        with _regular(self._path(path), os.O_RDONLY) as file:
            return file.read()

    def write_bytes(self, path: str, data: bytes) -> None:
        with self._lock:  # nothing is made after ``close``
            target = self._path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            file = _regular(target, os.O_WRONLY | os.O_CREAT)
        with file:
            file.truncate(0)
            file.write(data)

    def list_files(self, path: str) -> list[str]:
        folder = self._path(path)
        if not folder.exists():
            raise FileNotFoundError(2, os.strerror(2), path)
        if not folder.is_dir():
            raise NotADirectoryError(20, os.strerror(20), path)
        found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        return sorted(str(file.relative_to(folder)) for file in found if file.is_file() and not file.is_symlink())

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            background, self._background = self._background, []
        if self._keeper is not None:
            self._end_keeper(self._keeper)
        for process in background:
            process.forget()
        _remove(self._folder)

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, path: str) -> Path:
        if self._is_closed:
            raise OSError(GONE)
        if "\0" in path:
            raise FileNotFoundError("a path has no null character")
        if path == "~" or path.startswith("~/"):
            path = self.workdir + path[1:]
        return Path(self.workdir, path)

    def _make_folders(self) -> None:
        """Again, where a command deleted them. Raises OSError."""
        with self._lock:
            if self._is_closed:
                raise OSError(GONE)
            for folder in (self._folder, self.workdir, self.tmpdir, self._outputs):
                os.makedirs(folder, mode=0o700, exist_ok=True)

    def _start(
        self,
        command: str,
        workdir: str | None,
        stdin: int,
        environ: Mapping[str, str],
        *,
        is_terminal: bool = False,
    ) -> tuple[Status, Path, int]:
        if "\0" in command:
            raise OSError("a command has no null character")
        folder = self._path(workdir or ".")
        self._make_folders()
        with self._lock:
            self._count += 1
            number = self._count
        output = self._outputs / str(number)
        argv = [self._shell, "-c", command]
        if len(os.fsencode(command)) > _LONGEST_ARGUMENT:
            script = self._outputs / f"{number}.sh"
            script.write_bytes(os.fsencode(command))
            argv = [self._shell, str(script)]
        request = {
            "do": "start",
            "number": number,
            "argv": argv,
            "workdir": str(folder),
            "environ": {**self._environ, **environ},
            "limits": self.limits.for_kernel(),
            "processes": self.limits.processes,
            "pty": is_terminal,
        }
        with output.open("ab") as file:
            out = stdin if is_terminal else file.fileno()
            status = self._ask(request, stdin, out, out)
        status.wait(None, until_started=True)
        if status.error is not None:
            raise OSError(status.error)
        return status, output, number

    def _finish(
        self, status: Status, output: Path, number: int, timeout_s: float, limit_bytes: int | None
    ) -> CommandResult:
        error = None
        left_s = timeout_s
        while not status.wait(min(left_s, _LOOK_S)):
            left_s -= _LOOK_S
            written = output.stat().st_size if output.exists() else 0
            if left_s <= 0:
                error = f"Command timed out after {timeout_s:g} s and was ended."
            elif written > self.limits.output_bytes:
                error = f"Command wrote more than {self.limits.output_bytes} bytes and was ended."
            if error is not None:
                self._kill(number, status)
                status.wait(_CLOSE_S)
                break
        data, cut = _ends(output, limit_bytes)
        if error is not None:
            return CommandResult(data, 124 if left_s <= 0 else -signal.SIGKILL, error, cut)
        code = -1 if status.exit_code is None else status.exit_code
        return CommandResult(data, code, status.error, cut)

    def _kill(self, number: int, status: Status) -> None:
        with suppress(OSError):
            _answered(self._ask({"do": "kill", "number": number, "pid": status.pid}))

    def _ask(self, request: Mapping[str, object], *fds: int) -> Status:
        """Sends it to the keeper, which is started if there is none yet. Raises OSError."""
        body = json.dumps(request).encode()
        reading, writing = os.pipe()
        try:
            with self._lock:
                if self._is_closed and request["do"] != "close":
                    raise OSError(GONE)
                if self._socket is None:
                    self._socket, self._keeper = self._started_keeper()
                header = len(body).to_bytes(keeper.HEADER_BYTES, "big")
                socket.send_fds(self._socket, [header], [*fds, writing])
                self._socket.sendall(body)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return Status(reading)

    def _started_keeper(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        told = (theirs.fileno(), self._folder, self.limits.processes, self.limits.disk_bytes)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *map(str, told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        return ours, process

    def _end_keeper(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(OSError):
            _answered(self._ask({"do": "close"}))
        assert self._socket is not None
        self._socket.close()
        try:
            code = process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:  # it was killed, so what it kept is somebody else's child now
            _end_marked(self._folder.name)


def _answered(status: Status) -> None:
    status.wait(_CLOSE_S)
    status.close()


def _regular(path: Path, flags: int) -> BinaryIO:
    """Opens a file, and nothing that a reader could wait for or read for ever. Raises OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, os.strerror(21), str(path))
        raise OSError(f"{path} is no regular file")
    return open(fd, "wb" if flags & os.O_WRONLY else "rb")


def _terminal() -> tuple[int, int]:
    """(what the command gets, our side)."""
    ours, theirs = os.openpty()
    return theirs, ours


def _pump(fd: int, output: Path, limit_bytes: int) -> None:
    """What a terminal shows goes to its file, until nobody holds the terminal any more; beyond ``limit_bytes`` whoever
    writes to it has to wait."""
    poll = select.poll()  # the descriptor stays non-blocking: its duplicate is written to
    poll.register(fd, select.POLLIN)
    with suppress(OSError), output.open("ab", buffering=0) as file:
        while file.tell() < limit_bytes and poll.poll():
            if not (data := os.read(fd, 65536)):
                break
            file.write(data)
    os.close(fd)


def _ends(output: Path, limit_bytes: int | None) -> tuple[bytes, bool]:
    """(a command's output, whether its middle was left out)."""
    try:
        with output.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if limit_bytes is None or size <= limit_bytes:
                return file.read(), False
            head = file.read(limit_bytes * 2 // 5)
            file.seek(size - (limit_bytes - len(head)))
            return head + file.read(), True
    except FileNotFoundError:
        return b"", False


def _end_marked(marker: str) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARKER) == marker and process.pid != os.getpid():
                process.kill()


def _remove(folder: Path) -> None:
    """All of it, also what was made unreadable; nothing that its links point to."""
    if folder.is_symlink():
        folder.unlink()
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for parent, _, _ in os.walk(folder):
            with suppress(OSError):
                os.chmod(parent, 0o700)  # before the walk goes on into it
        for parent, folders, _ in os.walk(folder):
            for name in folders:
                with suppress(OSError):
                    if not os.path.islink(path := os.path.join(parent, name)):
                        os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)

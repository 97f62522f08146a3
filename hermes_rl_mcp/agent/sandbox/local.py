"""A sandbox on this machine: a private folder, processes with limits and an environment without keys.

Invariant: after ``close``, and after the death of this process however it dies, neither a process nor a file of the
folder is left. It keeps tasks apart and tidy; it does not keep a hostile program from reading what this user can read
or from the network: use docker for that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
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
    """Per process, as the kernel counts them, but for the last."""

    memory_bytes: int = 4 * 2**30
    """Of data (RLIMIT_DATA)."""
    file_bytes: int = 2**30
    open_files: int = 1024
    output_bytes: int = 64 * 2**20
    """A command in the foreground that writes more is ended."""

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
        for folder in (Path(self.workdir), Path(self.tmpdir), self._outputs):
            folder.mkdir(mode=0o700)
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
        with tempfile.TemporaryFile(dir=self._outputs_or_tmp()) as given:
            given.write(stdin or b"")
            given.seek(0)
            try:
                status, output, number = self._start(command, workdir, given.fileno(), environ or {})
            except OSError as error:
                return CommandResult(b"", -1, str(error))
        try:
            return self._finish(status, output, number, timeout_s, limit_bytes)
        finally:
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
            threading.Thread(target=_pump, args=(os.dup(writing), output), name="sandbox-pty", daemon=True).start()
        with self._lock:
            self._background.append(process)
        return process

    def processes(self) -> list[BackgroundProcess]:
        with self._lock:
            return list(self._background)

    def read_bytes(self, path: str) -> bytes:
        return self._path(path).read_bytes()

    def write_bytes(self, path: str, data: bytes) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

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
            process.close_input()
            process.poll()
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

    def _outputs_or_tmp(self) -> Path | None:
        return None if self._is_closed else self._outputs

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
            self._ask({"do": "kill", "number": number, "pid": status.pid}).wait(_CLOSE_S)

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
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), str(self._folder)],
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
            self._ask({"do": "close"}).wait(_CLOSE_S)
        assert self._socket is not None
        self._socket.close()
        try:
            code = process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:  # it was killed, so what it kept is somebody else's child now
            _end_marked(self._folder.name)


def _terminal() -> tuple[int, int]:
    """(what the command gets, our side)."""
    ours, theirs = os.openpty()
    return theirs, ours


def _pump(fd: int, output: Path) -> None:
    """What a terminal shows goes to its file, until nobody holds the terminal any more."""
    os.set_blocking(fd, True)
    with suppress(OSError), output.open("ab", buffering=0) as file:
        while data := os.read(fd, 65536):
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
    """All of it, also what was made unreadable."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for parent, _, _ in os.walk(folder):
            with suppress(OSError):
                os.chmod(parent, 0o700)  # before the walk goes on into it
        for parent, folders, _ in os.walk(folder):
            for name in folders:
                with suppress(OSError):
                    os.chmod(os.path.join(parent, name), 0o700, follow_symlinks=True)
        shutil.rmtree(folder, ignore_errors=True)

"""A sandbox in a container of its own, by docker's command line.

Invariant: the container ends and removes itself after ``lifetime_s``, so none stays even when this process is killed;
``close`` removes it at once. Nothing of this machine is mounted into it, and no variable of ours goes in.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from hermes_rl_mcp.agent.interfaces import BackgroundProcess, CommandResult
from hermes_rl_mcp.agent.sandbox.command import GONE
from hermes_rl_mcp.agent.sandbox.local import Limits, LocalSandbox
from hermes_rl_mcp.errors import PreflightError

LABEL = "hermes-rl-sandbox"
DEFAULT_IMAGE = "python:3.11-slim"
_CLIENT = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "HOME")
_START_S = 900.0
"""The image may have to be fetched first."""
_ENGINE_S = 60.0
_KILLED = 137
_SPARE_S = 10.0
_FILE_BYTES = 16 * 2**30


@dataclass(frozen=True)
class DockerOptions:
    """What ``docker run`` is told. ``network``: none, bridge or a network's name; with none nothing can be reached."""

    image: str = DEFAULT_IMAGE
    network: str = "none"
    workdir: str = "/workspace"
    memory_bytes: int = 4 * 2**30
    cpus: float = 1.0
    processes: int = 512
    lifetime_s: int = 3600


class DockerSandbox:
    """``interfaces.Sandbox`` in a container. Raises PreflightError where there is no engine or the image cannot run.

    The image needs sh, cat, find, mkdir, sleep and timeout. The command line's own processes and their output belong to
    a local sandbox, which ends them.
    """

    def __init__(self, task_id: str = "", options: DockerOptions | None = None, *, program: str = "docker") -> None:
        self.task_id = task_id or uuid.uuid4().hex
        self.options = options or DockerOptions()
        self.workdir = self.options.workdir
        self.tmpdir = "/tmp"
        self._name = f"{LABEL}-{uuid.uuid4().hex[:16]}"
        self._program = shutil.which(program) or ""
        if not self._program:
            raise PreflightError(
                "terminal_backend is docker, and there is no program docker in PATH.",
                hint="Install docker, or set terminal_backend to local.",
            )
        self._is_closed = False
        client = {name: os.environ[name] for name in _CLIENT if name in os.environ}
        limits = Limits(file_bytes=_FILE_BYTES, output_bytes=_FILE_BYTES, disk_bytes=4 * _FILE_BYTES)
        self._local = LocalSandbox(self.task_id, limits=limits, environ=client)
        try:
            self._create()
        except BaseException:
            self.close()
            raise

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
        if self._is_closed:
            return CommandResult(b"", -1, GONE)
        argv = ["timeout", "-s", "KILL", f"{timeout_s:g}", *self._shell(command)]
        begun = time.monotonic()
        done = self._local.run(
            shlex.join(self._exec(argv, workdir, environ or {})),
            timeout_s=timeout_s + _SPARE_S,
            stdin=stdin,
            limit_bytes=limit_bytes,
        )
        if done.exit_code == 124 or (done.exit_code == _KILLED and time.monotonic() - begun >= timeout_s):
            return CommandResult(done.output, 124, f"Command timed out after {timeout_s:g} s and was ended.", done.cut)
        return done

    def start(self, command: str, *, workdir: str | None = None, pty: bool = False) -> BackgroundProcess:
        """See ``interfaces.Sandbox``. Raises OSError if it cannot be started."""
        if self._is_closed:
            raise OSError(GONE)
        mark = f"{self.tmpdir}/.{uuid.uuid4().hex}"
        argv = self._exec(["sh", "-c", f'echo $$ > {mark}; exec "$@"', "sh", *self._shell(command)], workdir, {}, pty)
        process = self._local.start(shlex.join(argv), pty=pty)
        # The command line's end does not end what it started: that leads a group of its own in the container.
        ended = f"pid=$(cat {mark}) && kill -KILL -- -$pid; rm -f {mark}"
        process.also_kill = lambda: self._sh(ended)
        return process

    def processes(self) -> list[BackgroundProcess]:
        return self._local.processes()

    def read_bytes(self, path: str) -> bytes:
        name = _quoted(path)
        self._require(path, f"test -e {name}", FileNotFoundError)
        self._require(path, f"test ! -d {name}", IsADirectoryError)
        self._require(path, f"test -f {name}", OSError)  # a pipe would be waited for
        done = self._sh(f"cat -- {name} 2>/dev/null")
        if done.exit_code != 0:
            raise PermissionError(13, os.strerror(13), path)
        return done.output

    def write_bytes(self, path: str, data: bytes) -> None:
        name = _quoted(path)
        done = self._sh(f'mkdir -p -- "$(dirname -- {name})" && cat > {name}', data)
        if done.exit_code != 0:
            raise OSError(f"{path}: {done.error or done.output.decode(errors='replace').strip()}")

    def list_files(self, path: str) -> list[str]:
        name = _quoted(path)
        self._require(path, f"test -e {name}", FileNotFoundError)
        self._require(path, f"test -d {name}", NotADirectoryError)
        done = self._sh(f"cd -- {name} && find . -type f -print0 2>/dev/null")
        return sorted(os.fsdecode(one).removeprefix("./") for one in done.output.split(b"\0") if one)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._local.run(shlex.join([self._program, "rm", "-f", "-v", self._name]), timeout_s=_ENGINE_S)
        self._local.close()

    def _create(self) -> None:
        one = self.options
        argv = [
            *(self._program, "run", "-d", "--rm", "--init", "--name", self._name),
            *("--label", f"{LABEL}={self.task_id}", "--network", one.network, "--memory", str(one.memory_bytes)),
            *("--cpus", f"{one.cpus:g}", "--pids-limit", str(one.processes), "--security-opt", "no-new-privileges"),
            *("-w", one.workdir, "--entrypoint", "sleep", one.image, str(one.lifetime_s)),
        ]
        done = self._local.run(shlex.join(argv), timeout_s=_START_S)
        if done.exit_code != 0:
            said = (done.error or done.output.decode(errors="replace")).strip()[-500:]
            raise PreflightError(
                f"docker cannot start a container of {one.image}: {said}",
                hint="See that the engine runs (docker info) and has the image, or set terminal_backend to local.",
            )

    def _exec(
        self, argv: list[str], workdir: str | None, environ: Mapping[str, str], is_terminal: bool = False
    ) -> list[str]:
        given = [word for name, value in environ.items() for word in ("-e", f"{name}={value}")]
        folder = os.path.join(self.workdir, workdir or "")
        return [self._program, "exec", "-it" if is_terminal else "-i", "-w", folder, *given, self._name, *argv]

    def _shell(self, command: str) -> list[str]:
        """bash where the image has it."""
        return ["sh", "-c", 'if command -v bash >/dev/null; then exec bash -c "$0"; fi; exec sh -c "$0"', command]

    def _sh(self, script: str, stdin: bytes | None = None) -> CommandResult:
        if self._is_closed:
            raise OSError(GONE)
        return self._local.run(shlex.join(self._exec(["sh", "-c", script], None, {})), timeout_s=_START_S, stdin=stdin)

    def _require(self, path: str, condition: str, error: type[OSError]) -> None:
        if self._sh(condition).exit_code != 0:
            raise error(f"{path}: {error.__name__}")


def _quoted(path: str) -> str:
    """For the container's shell, which knows what its ``~`` is."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:])}' if path != "~" else '"$HOME"'
    return shlex.quote(path if path.startswith("/") else f"./{path}")

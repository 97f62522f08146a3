"""A folder as a sandbox, a page server and a call by name, for tests of tools."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hermes_rl_mcp.agent.calls import call_tool
from hermes_rl_mcp.agent.interfaces import CallContext, CommandResult, Tool
from hermes_rl_mcp.agent.toolbox import tools_by_name


class FolderProcess:
    """A command in the background, its output in a file."""

    def __init__(self, session_id: str, command: str, folder: Path) -> None:
        self.session_id, self.command = session_id, command
        self._log = folder.parent / f"{session_id}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", command], cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def output(self, offset: int = 0, limit: int | None = None) -> bytes:
        data = self._log.read_bytes()[offset:]
        return data if limit is None else data[:limit]

    def write(self, data: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def close_input(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.close_input()


@dataclass
class FolderSandbox:
    """Commands run in ``folder``, which is HOME, too."""

    folder: Path
    task_id: str = "task"
    started: list[FolderProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.workdir = str(self.folder)

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
        variables = {"PATH": os.environ["PATH"], "HOME": self.workdir, **(environ or {})}
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder / (workdir or "."),
                input=stdin or b"",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                env=variables,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return CommandResult(error.stdout or b"", 124, f"Its time of {timeout_s:g} s ran out.")
        return CommandResult(done.stdout, done.returncode)

    def start(self, command: str, *, workdir: str | None = None, pty: bool = False) -> FolderProcess:
        self.started.append(FolderProcess(f"p{len(self.started) + 1}", command, self.folder / (workdir or ".")))
        return self.started[-1]

    def processes(self) -> list[FolderProcess]:
        return list(self.started)

    def read_bytes(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def write_bytes(self, path: str, data: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def list_files(self, path: str) -> list[str]:
        root = self.folder / path
        if not root.is_dir():
            raise FileNotFoundError(path)
        return sorted(str(one.relative_to(root)) for one in root.rglob("*") if one.is_file())

    def close(self) -> None:
        for one in self.started:
            one.kill()


class Caller:
    """Calls tools by name in one task."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.sandbox = FolderSandbox(folder / "sandbox")
        self.context = CallContext("task", lambda: self.sandbox, settings or {})

    def __call__(self, name: str, /, **args: Any) -> Any:
        return self.call(tools_by_name()[name], args)

    def call(self, tool: Tool, args: Mapping[str, Any]) -> Any:
        return call_tool(tool, args, self.context)

    def close(self) -> None:
        for one in self.context.state.values():
            if hasattr(one, "close"):
                one.close()
        self.sandbox.close()


@dataclass
class Asked:
    """One request that a page server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@contextmanager
def page_server(answers: Mapping[str, tuple[int, str, bytes]]) -> Iterator[tuple[str, list[Asked]]]:
    """Serves path (without query) -> (status, content type, body); a status of 300 to 399 redirects to the body."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append(Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, kind, data = answers.get(self.path.partition("?")[0], (404, "text/plain", b"nothing"))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", data.decode())
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)

"""A command below a keeper, seen from the process that asked for it: its exit code, its output file, its stdin.

Invariant: the exit code is what the keeper said; a keeper that is gone is an error, never a success.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GONE = "the sandbox has ended"


class Status:
    """The reading end of a command's pipe. Thread-safe; closed with the word that says how the command ended."""

    def __init__(self, fd: int) -> None:
        self.exit_code: int | None = None
        self.error: str | None = None
        self.pid = 0
        self._fd = fd
        self._text = b""
        self._lock = threading.Lock()
        os.set_blocking(fd, False)

    def wait(self, timeout_s: float | None, *, until_started: bool = False) -> bool:
        """Whether the command has ended (or has been started) within ``timeout_s``; None = however long it takes."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._read()
                if self.exit_code is not None or (until_started and self.pid):
                    return True
                fd = self._fd
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                # a second waiter looks again soon: the first one may take the word and close the pipe
                poll = select.poll()
                poll.register(fd, select.POLLIN)
            poll.poll(200 if left_s is None else min(200, max(1, left_s * 1000)))

    def close(self) -> None:
        """Waits no more."""
        with self._lock:
            self._read()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
                self.exit_code, self.error = -1, self.error or GONE

    def _read(self) -> None:
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 4096)
            except BlockingIOError:
                return
            self._text += data
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if not data and self.exit_code is None:
                self.exit_code, self.error = -1, self.error or GONE
            if self.exit_code is not None:
                os.close(self._fd)
                self._fd = -1

    def _take(self, message: dict[str, Any]) -> None:
        self.pid = message.get("pid", self.pid)
        self.error = message.get("error", self.error)
        if self.error is not None or "closed" in message:
            self.exit_code = -1
        self.exit_code = message.get("exit", self.exit_code)


class LocalProcess:
    """A command in the background (``interfaces.BackgroundProcess``)."""

    def __init__(
        self, session_id: str, command: str, status: Status, output: Path, stdin: int, kill: Callable[[], None]
    ) -> None:
        self.session_id = session_id
        self.command = command
        self._status = status
        self._output = output
        self._stdin = stdin
        self._lock = threading.Lock()
        self._kill = kill
        self.also_kill: Callable[[], object] | None = None
        """What else ends it: a part of it that runs elsewhere."""

    @property
    def error(self) -> str | None:
        """Why it could not be run, or ended without an exit code."""
        return self._status.error

    def poll(self) -> int | None:
        self._status.wait(0)
        return self._status.exit_code

    def output(self, offset: int = 0, limit: int | None = None) -> bytes:
        try:
            with self._output.open("rb") as file:
                file.seek(offset)
                return file.read(-1 if limit is None else limit)
        except FileNotFoundError:  # the sandbox was closed
            return b""

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._stdin < 0:
                raise BrokenPipeError("its stdin is closed")
            view = memoryview(data)
            poll = select.poll()  # unlike select, for descriptors of any number
            poll.register(self._stdin, select.POLLOUT)
            while view:
                poll.poll(200)
                if self.poll() is not None:
                    raise BrokenPipeError("it has ended")
                with suppress(BlockingIOError):
                    view = view[os.write(self._stdin, view) :]

    def close_input(self) -> None:
        with self._lock:
            if self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    def wait(self, timeout_s: float) -> int | None:
        self._status.wait(timeout_s)
        return self._status.exit_code

    def forget(self) -> None:
        """Closes what is held of it, when its sandbox has ended."""
        self._status.close()
        self.close_input()

    def kill(self) -> None:
        if self.also_kill is not None:
            self.also_kill()
        self._kill()
        self._status.wait(10)

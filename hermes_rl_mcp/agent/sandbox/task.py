"""The one sandbox of a task, made when somebody first asks for it.

Invariant: a task that never used it costs nothing, and after ``close`` none is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hermes_rl_mcp.agent.interfaces import Sandbox


class TaskSandbox:
    """Called, it gives the sandbox. Thread-safe. Raises OSError after ``close``."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self._make = make
        self._made: Sandbox | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __call__(self) -> Sandbox:
        with self._lock:
            if self._is_closed:
                raise OSError("the task has ended")
            if self._made is None:
                self._made = self._make()
            return self._made

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            made, self._made = self._made, None
        if made is not None:
            made.close()

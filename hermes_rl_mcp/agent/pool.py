"""Threads for tools that block, as many as an environment asks for.

Invariant: changing the size loses no call: those under way and those that wait are done by the threads they were given
to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from hermes_rl_mcp.errors import InvalidValueError

DEFAULT_SIZE = 128
_T = TypeVar("_T")


class ToolPool:
    """Thread-safe by the executor's own locks; ``resize`` belongs to the event loop's thread."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._executor = _executor(size)
        self.size = size

    async def run(self, work: Callable[[], _T]) -> _T:
        """``work`` in one of the threads; waits for a free one. What it raises is raised here."""
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: context.run(work))

    def resize(self, size: int) -> None:
        """Later calls get ``size`` threads. Raises InvalidValueError below 1."""
        new = _executor(size)
        old, self._executor, self.size = self._executor, new, size
        old.shutdown(wait=False)

    def close(self) -> None:
        """No more calls; does not wait for those under way."""
        self._executor.shutdown(wait=False)


def _executor(size: int) -> ThreadPoolExecutor:
    if size < 1:
        raise InvalidValueError(f"tool_pool_size is {size}.", hint="Give at least one thread.")
    return ThreadPoolExecutor(size, thread_name_prefix="agent-tool")

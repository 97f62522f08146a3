"""What every operation is given: the operator's settings, where things lie, and the clock."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from hermes_rl_mcp.catalog.describe import Describer
from hermes_rl_mcp.contracts.settings import Settings
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.settings import Operator
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.configuration.session import SessionStore
from hermes_rl_mcp.runs.store import RunStore

MAX_WAIT_S = 50.0
"""Longest wait of one call: most MCP clients give up on it after 60 s."""
PROGRESS_S = 3.0
"""Between two progress notes: several clients measure their patience from the last one."""

Progress = Callable[[float, float | None, str], Awaitable[None]]
"""(done, total, sentence), called now and then while an operation waits."""


async def no_progress(done: float, total: float | None, message: str) -> None:
    """For callers that do not show any."""


@dataclass
class Viewer:
    """What the clients of one server have been told of the session. Lost with the server: whoever has seen nothing yet
    has nothing to lose. Several clients of one server share it; between them only an explicit revision protects."""

    name: str = field(default_factory=lambda: f"server process {os.getpid()} ({secrets.token_hex(3)})")
    """Signs changes of the session. The random part tells two servers apart that had the same pid one after another."""
    revision: int | None = None
    """The last one shown."""


@dataclass(frozen=True)
class Context:
    """Built once per server; apart from ``viewer`` it holds no state of its own."""

    operator: Operator
    clock: Callable[[], float] = time.time
    """Wall clock, seconds: what is stored on disk must mean the same in another process."""
    viewer: Viewer = field(default_factory=Viewer)

    @property
    def settings(self) -> Settings:
        return self.operator.settings

    @property
    def home(self) -> Home:
        return self.operator.home

    @property
    def sessions(self) -> SessionStore:
        return SessionStore(self.home)

    @property
    def runs(self) -> RunStore:
        return RunStore(self.home)

    @property
    def describer(self) -> Describer:
        return Describer(self.home.schema_cache, helper_environ(self.home, self.operator.environ))

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

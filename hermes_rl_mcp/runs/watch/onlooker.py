"""Looks on while a run is carried out: writes ``vitals.json``, raises and takes back the flag ``stalled``, and sees the
disk fill up. It ends nothing and restarts nothing; whatever goes wrong here, the run goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio

from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import ProcessName, RunStatus
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.redact import redact_text
from hermes_rl_mcp.runs import outcome, reserve
from hermes_rl_mcp.runs.health import Health
from hermes_rl_mcp.runs.process import ManagedProcess
from hermes_rl_mcp.runs.specs import Limits
from hermes_rl_mcp.runs.state import RunState
from hermes_rl_mcp.runs.watch.vitals import Seen, Watcher

_log = logging.getLogger(__name__)

_FULL_LOOKS = 2
"""Looks in a row that must find the disk full. A checkpoint that did not fit is taken away again by the trainer, which
then says so itself."""


class FullDisk(NamedTuple):
    folder: Path
    free_bytes: int


class Onlooker:
    """Of one run, from its first process on. ``processes`` is the supervisor's own table and grows; ``secrets`` are
    masked in all that is written."""

    def __init__(
        self,
        home: Home,
        state: RunState,
        config: RunConfig,
        health: Health,
        processes: Mapping[ProcessName, ManagedProcess],
        limits: Limits,
        secrets: Sequence[str],
    ) -> None:
        paths = home.run(config.run.run_id)
        folders = {paths.dir, home.logs, Path(config.trainer.checkpoint_dir or paths.dir)}
        self._watcher = Watcher(paths, folders, config, health, limits.vitals_s, self._mask)
        self._home = home
        self._state = state
        self._processes = processes
        self._limits = limits
        self._secrets = secrets
        self._full_looks = 0
        self._low_noted = False
        self.full_disk: FullDisk | None = None
        """Set once the run cannot go on for want of room."""

    @property
    def peak_memory_bytes(self) -> int | None:
        return self._watcher.peak_memory_bytes

    async def run(self) -> None:
        """Until cancelled."""
        failing = False
        while True:
            try:
                await self._look()
                failing = False
            except Exception as error:  # noqa: BLE001 - as the module's docstring says
                if not failing:
                    defect = None if isinstance(error, OSError) else error
                    _log.warning("could not look at the processes: %s", error, exc_info=defect)
                failing = True
            await anyio.sleep(self._limits.vitals_s)

    async def _look(self) -> None:
        identities = {name: process.identity for name, process in self._processes.items()}
        seen = await self._watcher.look(self._state.record, identities)
        self._reap(seen.dead)
        self._judge_disk(seen)
        self._judge_stillness(seen)
        await self._watcher.write(seen)

    def _reap(self, dead: Sequence[int]) -> None:
        """Adopted children; our own keep their numbers until they are judged."""
        for pid in set(dead) - {process.identity.pid for process in self._processes.values()}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _judge_disk(self, seen: Seen) -> None:
        free, folder = seen.disk
        self._full_looks = self._full_looks + 1 if free < reserve.FULL_BYTES else 0
        if self._full_looks >= _FULL_LOOKS:
            self.full_disk = FullDisk(folder, free)
        elif free < reserve.LOW_BYTES and not self._low_noted:
            self._low_noted = True
            with suppress(OSError):  # low has become full
                self._state.note(f"disk space is low: {free // 2**20} MiB are left in {folder}")

    def _judge_stillness(self, seen: Seen) -> None:
        record, idle_s = self._state.record, seen.vitals.idle_s
        still = idle_s >= self._limits.stall_s
        if record.status is not RunStatus.RUNNING or seen.waiting is None or still == record.stalled:
            return
        if still:
            reason = self._stall_reason(seen, idle_s)
            self._state.update(stalled=True, stalled_reason=reason)
            self._state.note(f"stalled. {reason}")
        else:
            self._state.update(stalled=False, stalled_reason=None)
            self._state.note("no longer stalled: something moves again")

    def _stall_reason(self, seen: Seen, idle_s: float) -> str:
        assert seen.waiting is not None
        culprit = seen.waiting.culprit
        line = outcome.last_line(self._home.log(culprit, self._state.record.run_id), self._secrets)
        queue = seen.vitals.queue_size
        parts = [
            f"Nothing has moved for {idle_s:.0f} s: {seen.waiting.words}.",
            "" if queue is None else f"Groups queued: {queue}.",
            f"Last log line of the {outcome.TITLES[culprit]}: {line}" if line else "",
        ]
        return self._mask(" ".join(part for part in parts if part))

    def _mask(self, text: str) -> str:
        return redact_text(text, self._secrets)

"""What a run's processes do right now: asked every few seconds, written to ``vitals.json``, and how long nothing moved.

An answer that is late or missing is no news: figures keep their last value, and only a change of one counts as
movement. Looking never blocks the event loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anyio import create_task_group, to_thread

from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.runs import Identity, ProcessName, RunRecord, RunStatus
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from hermes_rl_mcp.contracts.vitals import EnvState, ProcessVitals, Vitals
from hermes_rl_mcp.files import now, read_file, write_atomic
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs import family, outcome, reserve
from hermes_rl_mcp.runs.env_state import read_env_state
from hermes_rl_mcp.runs.health import Health
from hermes_rl_mcp.runs.watch.waiting import Look, Waiting, waiting

_GAPS = 3.0
"""A longer pause than so many intervals between two looks was ours (a suspended machine, a stopped supervisor): nobody
can say whether the run stood still meanwhile, so it does not count."""


class Stillness:
    """How long each figure, and all of them together, have not changed. ``gap_s`` is the longest pause that counts."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._seen_at: float | None = None
        self._values: dict[str, object] = {}
        self.still_s: dict[str, float] = {}

    def see(self, figures: Mapping[str, object], at: float) -> float:
        """Takes in one look; ``at`` is monotonic. Returns the seconds in which nothing changed. None is no news."""
        gap_s = 0.0 if self._seen_at is None else min(max(0.0, at - self._seen_at), self._gap_s)
        self._seen_at = at
        for name in self.still_s:
            self.still_s[name] += gap_s
        for name, value in figures.items():
            if value is not None and (name not in self._values or self._values[name] != value):
                self._values[name] = value
                self.still_s[name] = 0.0
        return min(self.still_s.values(), default=0.0)


@dataclass(frozen=True)
class Seen:
    """One look, judged."""

    vitals: Vitals
    waiting: Waiting | None
    """None while the run is not running."""
    disk: tuple[int, Path]
    """Free bytes on the fullest file system that the run writes to, and the folder that lies there."""
    dead: list[int] = field(default_factory=list)
    """Adopted children that wait to be reaped."""


class Watcher:
    """Looks at one run. ``folders`` are those the run writes to; ``mask`` takes secrets out of what others said."""

    def __init__(
        self,
        paths: RunPaths,
        folders: Iterable[Path],
        config: RunConfig,
        health: Health,
        interval_s: float,
        mask: Callable[[str], str],
    ) -> None:
        self._paths = paths
        self._folders = tuple(folders)
        self._groups_per_batch = max(1, config.batch_size // config.group_size)
        self._health = health
        self._mask = mask
        self._stillness = Stillness(_GAPS * interval_s + 5.0)
        self.peak_memory_bytes: int | None = None

    async def look(self, record: RunRecord, identities: Mapping[ProcessName, Identity]) -> Seen:
        """Asks the servers, reads what the kernel and the files say."""
        api, trainer = await _ask(self._health, identities)
        files = await to_thread.run_sync(self._read, dict(identities), abandon_on_cancel=True)
        if files.family.memory_bytes:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, files.family.memory_bytes)
        idle_s = self._stillness.see(_figures(api, trainer, files), time.monotonic())
        judged = None
        if record.status is RunStatus.RUNNING:
            states = {name: sight.state for name, sight in files.family.members.items()}
            env_done = record.processes["env"].exit_code == 0  # it would not be running if that were not allowed
            judged = waiting(
                Look(api, trainer, files.env, states, self._groups_per_batch, self._stillness.still_s, env_done)
            )
        vitals = Vitals(
            time=now(),
            step=files.step,
            running_seconds=round(time.monotonic() - record.running_clock, 3) if record.running_clock else 0.0,
            queue_size=api and api.queue_size,
            batches_out=api and api.batches_out,
            environments=api and api.environments,
            groups_received=api and api.groups_received,
            groups_rejected=api and api.groups_rejected,
            activity=trainer and trainer.activity,
            idle_s=round(idle_s, 1),
            waiting=self._mask(judged.words if judged else record.detail),
            processes=_processes(api, trainer, files, self._mask),
            memory_bytes=files.family.memory_bytes,
            peak_memory_bytes=self.peak_memory_bytes,
            disk_free_bytes=files.disk[0],
        )
        return Seen(vitals, judged, files.disk, files.family.dead)

    async def write(self, seen: Seen) -> None:
        """Replaces ``vitals.json``."""
        text = seen.vitals.model_dump_json()
        await to_thread.run_sync(write_atomic, self._paths.vitals, text, abandon_on_cancel=True)

    def _read(self, identities: dict[ProcessName, Identity]) -> _Files:
        return _Files(
            family=family.look(identities),
            env=read_env_state(self._paths),
            step=outcome.steps_done(self._paths),
            progress=_text(self._paths.progress),
            disk=reserve.fullest(self._folders),
        )


@dataclass(frozen=True)
class _Files:
    """The part of a look that comes from the kernel and from files."""

    family: family.Family
    env: EnvState | None
    step: int
    progress: str | None
    disk: tuple[int, Path]


async def _ask(
    health: Health, identities: Mapping[ProcessName, Identity]
) -> tuple[HealthReply | None, SamplingHealth | None]:
    """Both at once, each within the time that a question may take."""
    found: dict[str, HealthReply | SamplingHealth | None] = {}

    async def api() -> None:
        found["api"] = await health.rollouts()

    async def trainer() -> None:
        found["trainer"] = await health.sampler()

    async with create_task_group() as group:
        if "api" in identities:
            group.start_soon(api)
        if "trainer" in identities:
            group.start_soon(trainer)
    reply, sampler = found.get("api"), found.get("trainer")
    return (
        reply if isinstance(reply, HealthReply) else None,
        sampler if isinstance(sampler, SamplingHealth) else None,
    )


def _figures(api: HealthReply | None, trainer: SamplingHealth | None, files: _Files) -> dict[str, object]:
    """All that moves while a run gets on."""
    names = ("current_step", "queue_size", "batches_out", "environments", "groups_received", "groups_rejected")
    counts: dict[str, object] = {name: getattr(api, name) if api else None for name in names}
    env = files.env
    return {
        **counts,
        "step": files.step,
        "progress": files.progress,
        "activity": trainer and trainer.activity,
        "phase": trainer and trainer.phase,
        "env_groups": (env.sent, env.failed, env.dropped, env.evaluating) if env else None,
    }


def _processes(
    api: HealthReply | None, trainer: SamplingHealth | None, files: _Files, mask: Callable[[str], str]
) -> dict[ProcessName, ProcessVitals]:
    doing: dict[ProcessName, str] = {
        "api": f"{api.queue_size} groups queued, {api.batches_out} batches out" if api else "",
        "trainer": trainer.phase if trainer else "",
        "env": _said_by(files.env),
    }
    answers: dict[ProcessName, bool | None] = {"api": api is not None, "trainer": trainer is not None, "env": None}
    return {
        name: ProcessVitals(
            answers=answers[name], state=sight.state, doing=mask(doing[name]), memory_bytes=sight.memory_bytes
        )
        for name, sight in files.family.members.items()
    }


def _said_by(env: EnvState | None) -> str:
    if env is None:
        return ""
    groups = f"{env.running} groups under way, {env.sent} sent"
    return f"{groups}; evaluating, {env.evaluating}" if env.evaluating else groups


def _text(progress: Path) -> str | None:
    try:
        return str(json.loads(read_file(progress))["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

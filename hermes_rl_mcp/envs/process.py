"""``process``: groups into a file, without a trainer. One JSON line per group, flushed at once, and a page for people.

Invariant: an existing file is never touched; the file always holds exactly the groups that were reported as written.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.envs.base import BaseEnv, RolloutsFailedError
from hermes_rl_mcp.envs.config import BaseEnvConfig
from hermes_rl_mcp.envs.groups import GivingUpError, checked
from hermes_rl_mcp.envs.hook_rules import groups_of
from hermes_rl_mcp.envs.view import page
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.files import write_atomic

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Items tried for one group before the command fails."""
FORCED: dict[str, Any] = {"ensure_scores_are_not_same": False, "include_messages": True, "use_wandb": False}
"""Defaults of this command, over ``config_init``, under YAML and flags."""


def free_path(path: Path) -> Path:
    """``path``, or the first of ``stem_1``, ``stem_2``, ... that does not exist."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate


def check_total(config: BaseEnvConfig) -> None:
    """Refused before anything is loaded."""
    if config.total_steps < 1:
        raise InvalidValueError(
            f"process makes total_steps groups; found total_steps = {config.total_steps}.",
            hint="Set --env.total_steps to at least 1.",
        )


class Processor:
    """Makes ``total_steps`` groups."""

    def __init__(self, env: BaseEnv) -> None:
        self.env = env
        self.path = free_path(Path(env.config.data_path_to_save_groups or f"data/{env.env_name()}.jsonl"))
        self._backlog: deque[Any] = deque()
        self._groups: list[ScoredData] = []

    async def run(self) -> Path:
        """The file written. Raises GivingUpError after ``ATTEMPTS`` items for one group failed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(exist_ok=False)
        total = self.env.config.total_steps
        limit = self.env.config.max_num_workers
        places = asyncio.Semaphore(limit if limit > 0 else self.env.config.max_num_workers_per_node)

        async def one() -> None:
            async with places:
                for group in await self._usable_groups():
                    if len(self._groups) < total:
                        self._write(group, total)

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(total):
                    tasks.create_task(one())
        except* GivingUpError as failures:
            failure = failures.exceptions[0]
        finally:
            self._note_usage()
            if self._groups:
                self.path.with_suffix(".html").write_text(page(self.env.env_name(), self._groups), encoding="utf-8")
        if failure:
            raise failure
        return self.path

    async def _usable_groups(self) -> list[ScoredData]:
        problems: list[str] = []
        for _ in range(ATTEMPTS):
            item = self._backlog.popleft() if self._backlog else await self.env.get_next_item()
            if item is None:
                raise GivingUpError("get_next_item() has no more items.", hint="Ask for fewer groups (total_steps).")
            try:
                return await self._collect(item)
            except Exception as error:
                log.warning("group failed: %s: %s", type(error).__name__, error, exc_info=None if problems else error)
                problems.append(f"{type(error).__name__}: {error}")
        raise GivingUpError(
            f"{ATTEMPTS} items in a row gave no usable group. The first: {problems[0]}",
            hint=f"{len(self._groups)} of {self.env.config.total_steps} groups were written to {self.path}.",
        )

    async def _collect(self, item: Any) -> list[ScoredData]:
        config = self.env.config
        async with asyncio.timeout(config.worker_timeout):
            found, more = groups_of(type(self.env), await self.env.collect_trajectories(item))
        self._backlog.extend(more)
        if not found:
            raise RolloutsFailedError("collect_trajectories returned no group")
        refuse = config.ensure_scores_are_not_same
        return [checked(group, group_size=config.group_size, refuse_equal_scores=refuse) for group in found]

    def _note_usage(self) -> None:
        """Beside the groups: tokens, cost and who answered, as far as the endpoint said."""
        usage = self.env.server.usage()
        said = {name: value for name, value in vars(usage).items() if value is not None and name != "providers"}
        if usage.providers:
            said["providers"] = sorted(usage.providers)
        if said:
            write_atomic(self.path.with_suffix(".usage.json"), json.dumps(said))

    def _write(self, group: ScoredData, total: int) -> None:
        if not self.env.config.include_messages:
            group = group.model_copy(update={"messages": None})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(group.model_dump(mode="json"), ensure_ascii=False) + "\n")
        self._groups.append(group)
        self._note_usage()
        mean = sum(group.scores) / len(group.scores)
        log.info("group %d of %d written, mean score %.3f", len(self._groups), total, mean)

"""``process``: groups into a file, without a trainer. One JSON line per group, flushed at once, and a page for people.

Invariant: an existing file is never touched; the file always holds exactly the groups that were reported as written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.envs.base import BaseEnv, RolloutsFailedError
from hermes_rl_mcp.envs.config import BaseEnvConfig
from hermes_rl_mcp.envs.group_file import GroupFile, line_of
from hermes_rl_mcp.envs.groups import GivingUpError, checked
from hermes_rl_mcp.envs.hook_rules import place
from hermes_rl_mcp.envs.places import place_of_error
from hermes_rl_mcp.envs.saying import first_of, said
from hermes_rl_mcp.envs.view import page
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.files import write_atomic

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Items tried for one group before the command fails."""
FORCED: dict[str, Any] = {"ensure_scores_are_not_same": False, "include_messages": True, "use_wandb": False}
"""Defaults of this command, over ``config_init``, under YAML and flags."""


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
        name = re.sub(r"[/\\\0]+|^\.+", "_", env.env_name())
        self._file = GroupFile(Path(env.config.data_path_to_save_groups or f"data/{name}.jsonl"))
        self.path = self._file.path
        self._user_file = str(getattr(sys.modules.get(type(env).__module__), "__file__", None) or "")
        self._groups: list[ScoredData] = []

    async def run(self) -> Path:
        """The file written. Raises GivingUpError after ``ATTEMPTS`` items for one group failed."""
        total = self.env.config.total_steps
        limit = self.env.config.max_num_workers
        places = asyncio.Semaphore(limit if limit > 0 else self.env.config.max_num_workers_per_node)

        async def one() -> None:
            async with places:
                for group, line in await self._usable_groups():
                    if len(self._groups) < total:
                        self._write(group, line, total)

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(total):
                    tasks.create_task(one())
        except* Exception as failures:  # noqa: BLE001 - a task group wraps whatever it is
            failure = first_of(failures)
        finally:
            self._note_usage()
            if self._groups:
                text = page(self.env.env_name(), self._groups)
                self.path.with_suffix(".html").write_text(text, encoding="utf-8", errors="backslashreplace")
        if failure:
            raise failure
        return self.path

    async def _usable_groups(self) -> list[tuple[ScoredData, str]]:
        """With their lines."""
        problems: list[str] = []
        for _ in range(ATTEMPTS):
            try:
                item = await self.env.next_item()
                if item is None:
                    raise NothingLeftError(
                        f"{place(type(self.env), 'get_next_item')} has no more items.",
                        hint="Ask for fewer groups (total_steps).",
                    )
                return await self._collect(item)
            except NothingLeftError:
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self._note(error, problems)  # raised by user code itself
            except Exception as error:  # noqa: BLE001 - user code and its endpoint; said at the end
                self._note(error, problems)
        raise GivingUpError(
            f"{ATTEMPTS} items in a row gave no usable group ({place(type(self.env))}). The first: {problems[0]}",
            hint=f"{len(self._groups)} of {self.env.config.total_steps} groups were written to {self.path}.",
        )

    def _note(self, error: BaseException, problems: list[str]) -> None:
        where = place_of_error(error, self._user_file)
        text = said(error)
        text = f"{text} ({where})" if where and where not in text else text
        log.warning("group failed: %s", text, exc_info=None if problems else error)
        problems.append(text)

    async def _collect(self, item: Any) -> list[tuple[ScoredData, str]]:
        config = self.env.config
        try:
            async with asyncio.timeout(config.worker_timeout) as scope:
                found = await self.env.groups_for(item)
        except TimeoutError as error:
            late = RolloutsFailedError(f"no group within worker_timeout = {config.worker_timeout:g} s")
            raise late if scope.expired() else error from error
        if not found:
            raise RolloutsFailedError("collect_trajectories returned no group")
        refuse = config.ensure_scores_are_not_same
        several = [checked(group, group_size=config.group_size, refuse_equal_scores=refuse) for group in found]
        if not config.include_messages:
            several = [one.model_copy(update={"messages": None}) for one in several]
        return [(one, line_of(one)) for one in several]

    def _note_usage(self) -> None:
        """Beside the groups: tokens, cost and who answered, as far as the endpoint said."""
        usage = self.env.server.usage()
        told = {name: value for name, value in vars(usage).items() if value is not None and name != "providers"}
        if usage.providers:
            told["providers"] = sorted(usage.providers)
        if told:
            write_atomic(self.path.with_suffix(".usage.json"), json.dumps(told))

    def _write(self, group: ScoredData, line: str, total: int) -> None:
        self._file.append(line)
        self._groups.append(group)
        self._note_usage()
        mean = sum(group.scores) / len(group.scores)
        log.info("group %d of %d written, mean score %.3f", len(self._groups), total, mean)


class NothingLeftError(GivingUpError):
    """There is nothing else to ask."""

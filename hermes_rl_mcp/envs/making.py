"""One item to its groups, and those to the rollout API and, if asked for, into a file.

Invariant: every group begun ends in one count of the ledger and of the tally; what goes wrong in user code or at its
endpoints gets no further than that. Only a lost rollout API gets out of here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import GroupNotes, ScoredData
from hermes_rl_mcp.envs.base import BaseEnv, RolloutsFailedError
from hermes_rl_mcp.envs.group_file import GroupFile
from hermes_rl_mcp.envs.groups import BadGroupError, Interval, Tally, checked
from hermes_rl_mcp.envs.ledger import Ledger
from hermes_rl_mcp.envs.places import place_of_error
from hermes_rl_mcp.envs.rollout_client import RolloutClient
from hermes_rl_mcp.envs.saying import said

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
"""After a failed group; doubled after each further one."""
LONGEST_PAUSE_S = 1.0
"""After failed groups."""


class GroupMaker:
    """For one environment and one rollout API; groups are made side by side."""

    def __init__(self, env: BaseEnv, api: RolloutClient, ledger: Ledger, tally: Tally) -> None:
        self.env_id = -1
        self.max_token_len = -1
        """Of the trainer; <= 0 = no limit."""
        self.paused_until = 0.0
        """On the monotonic clock; no group is to begin before."""
        self._env = env
        self._api = api
        self._ledger = ledger
        self._tally = tally
        self._interval = Interval()
        path = env.config.data_path_to_save_groups
        self._file = GroupFile(Path(path)) if path else None
        self._user_file = str(getattr(sys.modules.get(type(env).__module__), "__file__", None) or "")

    def taken(self) -> dict[str, float]:
        """Metrics since they were last taken."""
        metrics, self._interval = self._interval.metrics(), Interval()
        return metrics

    def failed(self, error: BaseException) -> None:
        """Counts it, and pauses a little longer each time."""
        self._tally.count_failed(error, place_of_error(error, self._user_file))
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._tally.unusable_in_a_row)
        self.paused_until = time.monotonic() + pause_s

    async def make(self, item: Any, step: int) -> None:
        """``step``: when it was begun."""
        began = time.monotonic()
        groups = await self._groups(item, step)
        self._interval.add_duration(time.monotonic() - began, made=bool(groups))
        for group in groups:
            await self._send(group, step, item)

    async def _groups(self, item: Any, step: int) -> list[Any]:
        limit_s = self._env.config.worker_timeout
        error: BaseException
        try:
            async with asyncio.timeout(limit_s) as scope:
                groups = await self._env.groups_for(item)
        except BadGroupError as refused:
            self._ledger.give_up(step)
            self._tally.count_dropped(refused)
            return []
        except asyncio.CancelledError as ended:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = ended  # raised by user code itself
        except TimeoutError as late:
            expired = scope.expired()
            error = RolloutsFailedError(f"no group within worker_timeout = {limit_s:g} s") if expired else late
        except Exception as raised:  # noqa: BLE001 - user code and its endpoints; one failed group is data, the run goes on
            error = raised
        else:
            if groups:
                self._ledger.begin(step, len(groups) - 1)
                return groups
            error = RolloutsFailedError("collect_trajectories returned no group")
        self._ledger.give_up(step)
        self.failed(error)
        return []

    async def _send(self, group: Mapping[str, Any], step: int, item: Any) -> None:
        config = self._env.config
        try:
            data = checked(
                group,
                group_size=config.group_size,
                max_token_len=self.max_token_len,
                refuse_equal_scores=config.ensure_scores_are_not_same,
            )
            notes = GroupNotes(
                group_id=uuid.uuid4().hex, begun_step=step, max_batches_offpolicy=config.max_batches_offpolicy
            )
            await self._api.send(_addressed(data, self.env_id, notes, config.include_messages))
        except BadGroupError as error:
            self._ledger.give_up(step)
            self._tally.count_dropped(error)
            return
        self._ledger.sent(step)
        self._tally.count_sent()
        self._interval.add(data)
        await self._show(data, item)

    async def _show(self, data: ScoredData, item: Any) -> None:
        """For people; training does not depend on it."""
        try:
            await self._env.add_rollouts_for_wandb(data.model_dump(), item)
            if self._file is not None:
                self._file.write(
                    data if self._env.config.include_messages else data.model_copy(update={"messages": None})
                )
        except Exception as error:
            # User code, and a full disk.
            log.warning("a group that was sent could not be kept: %s", said(error), exc_info=error)


def _addressed(data: ScoredData, env_id: int, notes: GroupNotes, with_messages: bool) -> ScoredData:
    """With our id on it. Two groups that happen to hold the same samples must not look like one sent twice."""
    mark = {**(data.group_overrides or {}), **notes.model_dump()}
    messages = data.messages if with_messages else None
    return data.model_copy(update={"env_id": env_id, "group_overrides": mark, "messages": messages})

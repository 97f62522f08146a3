"""The worker loop: keeps the trainer supplied with fresh groups until the process is told to stop.

Invariants: queued and running groups together never exceed ``max_batches_offpolicy`` batches; every group made is
counted as sent, dropped or failed; nothing here spins (a pass takes at least ``PASS_S``).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import InfoReply, RegisterEnv, ScoredData, StatusEnvReply
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.base import BaseEnv, RolloutsFailedError
from hermes_rl_mcp.envs.config import EvalHandling
from hermes_rl_mcp.envs.evaluate import run_evaluation
from hermes_rl_mcp.envs.groups import BadGroupError, Interval, Tally, checked
from hermes_rl_mcp.envs.held_out import HeldOut
from hermes_rl_mcp.envs.reports import MetricLines, StateFile
from hermes_rl_mcp.envs.rollout_client import RolloutClient, UnregisteredError
from hermes_rl_mcp.errors import InvalidValueError

log = logging.getLogger(__name__)

PASS_S = 0.05
"""Shortest time between two passes of the loop."""
POLL_S = 0.1
"""Between two looks at the queue while there is more to make."""
IDLE_POLL_S = 1.0
"""The same once everything was sent."""
LONGEST_PAUSE_S = 1.0
"""After failed groups."""
POSITION_S = 1.0
"""Between two saves of the environment's position that are not at a checkpoint of the trainer."""


class Worker:
    """One environment serving one rollout API."""

    def __init__(
        self,
        env: BaseEnv,
        api: RolloutClient,
        metrics: MetricLines,
        state: StateFile,
        held_out: HeldOut | None = None,
    ) -> None:
        """``held_out`` is what comes after the last step; None outside of a run."""
        self.env = env
        self.api = api
        self.metrics = metrics
        self.state = state
        self.tally = Tally()
        self.held_out = held_out
        self.backlog: deque[Any] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._evaluation: asyncio.Task[None] | None = None
        self._evaluation_due = False
        self._final: asyncio.Task[None] | None = None
        """The evaluation at the end of the run."""
        self._env_id = -1
        self._info = InfoReply(batch_size=-1, max_token_len=-1)
        self._total_steps = 0
        self._checkpoint_interval = 0
        self._position: int | None = None
        """Step of the newest position between checkpoints; the one before it is removed."""
        self._position_at = time.monotonic()
        self._position_seen = 0
        """Step at which the last one was saved."""
        self._paused_until = 0.0
        self._dry = False
        """The last question for an item found none."""
        self._sent_at_last_line = 0
        self._interval = Interval()

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set. Raises what makes going on pointless."""
        loop = asyncio.create_task(self._loop())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, loop}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                loop.result()
        finally:
            pending = {stopped, loop, *self._running()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if self._env_id >= 0 and self.env.curr_step > 0:
                self._save_position(self.env.curr_step)
            self.state.offer(self.tally.state(running=0), last=True)
            if self._env_id >= 0:
                await self.api.disconnect(self._env_id)

    async def _loop(self) -> None:
        await self._register()
        while True:
            started = time.monotonic()
            finished = await self._pass(len(self._tasks))
            await self._wait(IDLE_POLL_S if finished else POLL_S)
            self.state.offer(self._state())
            self.tally.raise_if_hopeless()
            if (rest_s := PASS_S - (time.monotonic() - started)) > 0:
                await asyncio.sleep(rest_s)

    async def _register(self) -> None:
        config = self.env.config
        name = config.wandb_name or self.env.env_name()
        reply = await self.api.register(
            RegisterEnv(
                max_token_length=config.max_token_length,
                desired_name=name,
                weight=config.inference_weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
            )
        )
        self._info = await self.api.info()
        _check_sizes(config.group_size, self._info.batch_size)
        first = self._env_id < 0
        self._env_id = reply.env_id if reply.env_id is not None else -1
        self._total_steps = config.total_steps if config.total_steps > 0 else reply.num_steps or 0
        self._checkpoint_interval = reply.checkpoint_interval or 0
        if reply.checkpoint_dir:
            self.env.checkpoint_dir = Path(reply.checkpoint_dir) / "env_checkpoints" / name
        if first and reply.starting_step:
            self.env.curr_step = self._position_seen = reply.starting_step
            self.env.load_checkpoint()
        if first and self.held_out is not None:
            batch_size = config.batch_size if config.batch_size > 0 else self._info.batch_size
            await self.held_out.plan(self._total_steps, batch_size)
        log.info("environment %d (%s) serves %d steps", self._env_id, reply.wandb_name, self._total_steps)

    async def _pass(self, running_before: int) -> bool:
        """One look at the queue and what follows from it. True if nothing is left to make.

        ``running_before`` was counted before the look: a group sent in between is counted twice rather than not at all.
        """
        try:
            status = await self.api.status(self._env_id)
        except UnregisteredError:
            log.warning("the rollout API does not know this environment any more; registering again")
            await self._register()
            status = await self.api.status(self._env_id)
        await self._follow(status.current_step)
        if await self._is_over(status.current_step):
            return True
        wanted, left = self._room(status, running_before)
        for _ in range(wanted):
            if not await self._start_one():
                break
        return left <= 0 and not self._tasks

    async def _is_over(self, step: int) -> bool:
        """Whether the trainer has completed and waits for the evaluation, which is begun then. What else is under way
        has become useless and would only slow it."""
        if self._final is None and self.held_out is not None and step >= self._total_steps and self.held_out.due():
            useless = self._running()
            for task in useless:
                task.cancel()
            await asyncio.gather(*useless, return_exceptions=True)
            self._tasks.clear()
            self._evaluation, self._evaluation_due = None, False
            self._final = asyncio.create_task(self.held_out.run())
        return self._final is not None

    def _running(self) -> set[asyncio.Task[None]]:
        further = [task for task in (self._evaluation, self._final) if task is not None and not task.done()]
        return {*self._tasks, *further}

    def _state(self) -> EnvState:
        evaluating = self.held_out.progress if self.held_out is not None and self._final is not None else ""
        return self.tally.state(len(self._tasks)).model_copy(update={"evaluating": evaluating})

    def _room(self, status: StatusEnvReply, running: int) -> tuple[int, int]:
        """How many groups to start now, and how many are still to be made at all."""
        config = self.env.config
        per_batch = max(1, self._info.batch_size // config.group_size)
        steps_left = self._total_steps - status.current_step - status.batches_out
        left = steps_left * per_batch - status.queue_size - running
        fresh = config.max_batches_offpolicy * per_batch - status.queue_size - running
        workers = self._workers() - running
        if time.monotonic() < self._paused_until:
            workers = 0
        return max(0, min(left, fresh, workers)), left

    def _workers(self) -> int:
        """Groups that may run at once, now."""
        config = self.env.config
        limit: int = config.max_num_workers
        if limit <= 0:
            limit = config.max_num_workers_per_node * max(1, len(self.env.server_configs))
        if self._evaluation_due or self._evaluation:
            if config.eval_handling == EvalHandling.STOP_TRAIN:
                return 0
            if config.eval_handling == EvalHandling.LIMIT_TRAIN:
                return int(limit * config.eval_limit_ratio)
        return limit

    async def _start_one(self) -> bool:
        item = self.backlog.popleft() if self.backlog else await self.env.get_next_item()
        if item is None:
            if not self._dry:
                log.info("get_next_item() has nothing at the moment; asking again until it has")
            self._dry = True
            return False
        self._dry = False
        self._tasks.add(asyncio.create_task(self._make(item)))
        return True

    async def _wait(self, timeout_s: float) -> None:
        """Until something running ends, at most ``timeout_s``; what ended is taken note of."""
        watched = self._running()
        if watched:
            await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(timeout_s)
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()
        if self._evaluation and self._evaluation.done():
            done, self._evaluation = self._evaluation, None
            done.result()

    async def _make(self, item: Any) -> None:
        """One item to its group or groups, sent. Only a lost rollout API gets out of here."""
        limit_s = self.env.config.worker_timeout
        try:
            async with asyncio.timeout(limit_s) as scope:
                groups, more = await self.env.collect_trajectories(item)
        except TimeoutError as error:
            self._failed(
                RolloutsFailedError(f"no group within worker_timeout = {limit_s:g} s") if scope.expired() else error
            )
            return
        except Exception as error:  # noqa: BLE001 - user code and its endpoints; one failed group is data, the run goes on
            self._failed(error)
            return
        self.backlog.extend(more or [])
        if groups is None:
            self._failed(RolloutsFailedError("collect_trajectories returned no group"))
            return
        for group in groups if isinstance(groups, list) else [groups]:
            await self._send(group)

    async def _send(self, group: Mapping[str, Any]) -> None:
        config = self.env.config
        try:
            data = checked(
                group,
                group_size=config.group_size,
                max_token_len=self._info.max_token_len,
                refuse_equal_scores=config.ensure_scores_are_not_same,
            )
            await self.api.send(_addressed(data, self._env_id, config.include_messages))
        except BadGroupError as error:
            self.tally.count_dropped(error)
            return
        self.tally.count_sent()
        self._interval.add(data)

    def _failed(self, error: Exception) -> None:
        self.tally.count_failed(error)
        pause_s = min(LONGEST_PAUSE_S, PASS_S * 2**self.tally.unusable_in_a_row)
        self._paused_until = time.monotonic() + pause_s

    async def _follow(self, step: int) -> None:
        """What a new trainer step brings: a metrics line, a checkpoint, an evaluation."""
        before, self.env.curr_step = self.env.curr_step, step
        if step > before:
            if _crosses(before, step, self.env.config.steps_per_eval):
                self._evaluation_due = True
            if _crosses(before, step, self._checkpoint_interval):
                # Named like the trainer's checkpoint, even if several steps went by since the last look.
                self._save_position(step - step % self._checkpoint_interval)
            if self.tally.sent - self._sent_at_last_line >= self.env.config.min_items_sent_before_logging:
                await self._log_step()
        if step > self._position_seen and time.monotonic() - self._position_at >= POSITION_S:
            self._save_position(step)
        if self._evaluation_due and self._evaluation is None and not self._must_finish_first():
            self._evaluation_due = False
            self._evaluation = asyncio.create_task(self._evaluate(step))

    def _save_position(self, step: int) -> None:
        """Where the environment stands. Between the trainer's checkpoints only the newest is kept: whoever goes on
        with this run and its waiting batches goes on behind them, not where a checkpoint was."""
        self._position_at, self._position_seen = time.monotonic(), self.env.curr_step
        try:
            self.env.save_checkpoint(step)
            if self._position is not None and self._position != step and self.env.checkpoint_dir is not None:
                (self.env.checkpoint_dir / f"step-{self._position}.json").unlink(missing_ok=True)
        except Exception as error:
            # User code and a full disk; training does not depend on it.
            log.warning(
                "the position at step %d could not be saved: %s: %s", step, type(error).__name__, error, exc_info=error
            )
        passing = not self._checkpoint_interval or step % self._checkpoint_interval
        self._position = step if passing else None

    def _must_finish_first(self) -> bool:
        return bool(self._tasks) and self.env.config.eval_handling == EvalHandling.STOP_TRAIN

    async def _log_step(self) -> None:
        metrics = {**self._interval.metrics(), **self.tally.metrics()}
        self._interval = Interval()
        self._sent_at_last_line = self.tally.sent
        try:
            await self.env.wandb_log(metrics)
        except Exception as error:
            # User code; a metric that cannot be made is no reason to stop training.
            log.warning("wandb_log failed: %s: %s", type(error).__name__, error, exc_info=error)

    async def _evaluate(self, step: int) -> None:
        try:
            report = await run_evaluation(self.env, step)
        except Exception as error:
            log.warning("evaluation at step %d failed: %s: %s", step, type(error).__name__, error, exc_info=error)
            return
        if report.metrics:
            self.metrics.write(step, report.metrics)


def _addressed(data: ScoredData, env_id: int, with_messages: bool) -> ScoredData:
    """With our id on it. Two groups that happen to hold the same samples must not look like one sent twice."""
    mark = {**(data.group_overrides or {}), "group_id": uuid.uuid4().hex}
    messages = data.messages if with_messages else None
    return data.model_copy(update={"env_id": env_id, "group_overrides": mark, "messages": messages})


def _crosses(before: int, step: int, interval: int) -> bool:
    return interval > 0 and step // interval > before // interval


def _check_sizes(group_size: int, batch_size: int) -> None:
    if batch_size > 0 and batch_size % group_size:
        raise InvalidValueError(
            f"batch_size {batch_size} is not a multiple of group_size {group_size}: no batch could ever be formed.",
            hint="Change batch_size or group_size.",
        )

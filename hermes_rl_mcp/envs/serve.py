"""The worker loop: keeps the trainer supplied with fresh groups until the process is told to stop.

Invariants: no group is begun for which the rollout API has no room (of an API that says nothing of room: queued and
running groups together never exceed ``max_batches_offpolicy`` batches); every group made is counted as sent, dropped or
failed; nothing here spins: the API holds back its answer until there is news, and without news a pass takes
``POLL_S``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import EnvReport, InfoReply, RegisterEnv, StatusEnvReply
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.base import BaseEnv, RolloutsFailedError
from hermes_rl_mcp.envs.config import EvalHandling
from hermes_rl_mcp.envs.evaluate import run_evaluation
from hermes_rl_mcp.envs.groups import GivingUpError, Tally
from hermes_rl_mcp.envs.held_out import HeldOut
from hermes_rl_mcp.envs.hook_rules import place
from hermes_rl_mcp.envs.ledger import Ledger
from hermes_rl_mcp.envs.making import GroupMaker
from hermes_rl_mcp.envs.reports import MetricLines, StateFile
from hermes_rl_mcp.envs.rollout_client import RolloutClient, UnregisteredError
from hermes_rl_mcp.envs.saying import said
from hermes_rl_mcp.errors import InvalidValueError

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Between two looks where there is nothing to wait for: an API that answers at once, an item that is not there yet, the
end of the trainer's last step."""
LOOK_S = 1.0
"""How long one question is held back by the API. By then the next one says anew what is under way."""
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
        self.ledger = Ledger()
        self.maker = GroupMaker(env, api, self.ledger, self.tally)
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.Task[StatusEnvReply] | None = None
        self._looked = (False, 0)
        """What decides about the answer: whether there is room for more here, and how many were given up."""
        self._looked_at = 0.0
        self._step: int | None = None
        """As the rollout API last said."""
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
        self._dry = False
        """The last question for an item found none."""
        self._sent_at_last_line = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set. Raises what makes going on pointless."""
        loop = asyncio.create_task(self._loop())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, loop}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                loop.result()
        finally:
            pending: set[asyncio.Task[Any]] = {stopped, loop, *self._running(), *({self._look} if self._look else ())}
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
            await self._pass()
            self.state.offer(self._state())
            try:
                self.tally.raise_if_hopeless()
            except GivingUpError as error:
                raise GivingUpError(f"{error.message} ({place(type(self.env))})", hint=error.hint) from error

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
                max_batches_offpolicy=config.max_batches_offpolicy,
            )
        )
        self._info = await self.api.info()
        self.env.trainer_max_tokens = self._info.max_token_len if self._info.max_token_len > 0 else None
        _check_sizes(config.group_size, self._info.batch_size)
        first = self._env_id < 0
        self._env_id = reply.env_id if reply.env_id is not None else -1
        self.maker.env_id, self.maker.max_token_len = self._env_id, self._info.max_token_len
        self._step = reply.starting_step
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

    async def _pass(self) -> None:
        """Waits for news, of the API or of what is under way here, and acts on it."""
        capacity = self._capacity()
        asks = (capacity > 0, self.ledger.given_up)
        if self._look is not None and not self._look.done() and asks != self._looked:
            self._look.cancel()
            self._look = None
        if self._look is None:
            self._look = asyncio.create_task(self.api.status(self._env_id, self._report(capacity)))
            self._looked, self._looked_at = asks, time.monotonic()
        await self._wait({self._look}, self._patience_s())
        if self._look.done():
            look, self._look = self._look, None
            try:
                await self._act(look.result())
            except UnregisteredError:
                log.warning("the rollout API does not know this environment any more; registering again")
                await self._register()
        if not await self._is_over():
            self._evaluate_if_due()

    def _report(self, capacity: int) -> EnvReport:
        return EnvReport(
            env_id=self._env_id,
            max_batches_offpolicy=self.env.config.max_batches_offpolicy,
            last_step=self._total_steps,
            groups=self.ledger.groups(),
            wants=max(0, capacity),
            known_step=self._step,
            wait_s=LOOK_S,
        )

    def _patience_s(self) -> float:
        """Until something here is due."""
        if self._step is not None and self._step >= self._total_steps:
            return POLL_S
        pause_s = self.maker.paused_until - time.monotonic()
        return pause_s if 0 < pause_s < LOOK_S else LOOK_S

    async def _act(self, status: StatusEnvReply) -> None:
        """New groups first: the sampler waits for them. Then what a new step brings."""
        step_before, self._step = self._step, status.current_step
        before, self.env.curr_step = self.env.curr_step, status.current_step
        self._evaluation_due |= _crosses(before, self._step, self.env.config.steps_per_eval)
        begun = 0
        wanted = min(self._room(status), self._capacity())
        while begun < wanted and await self._start_one(self._step):
            begun += 1
        if begun < wanted:
            self.maker.paused_until = max(self.maker.paused_until, time.monotonic() + POLL_S)  # no item
        await self._follow(before, self._step)
        no_news = not begun and self._step == step_before
        if status.room is None or (no_news and time.monotonic() - self._looked_at < POLL_S):
            await self._wait(set(), POLL_S)

    async def _is_over(self) -> bool:
        """Whether the trainer has completed and waits for the evaluation, which is begun then. What else is under way
        has become useless and would only slow it."""
        at_end = self._step is not None and self._step >= self._total_steps
        if self._final is None and self.held_out is not None and at_end and self.held_out.due():
            useless = self._running()
            for task in useless:
                task.cancel()
            await asyncio.gather(*useless, return_exceptions=True)
            self._tasks.clear()
            self.ledger.abandon()
            self._evaluation, self._evaluation_due = None, False
            self._final = asyncio.create_task(self.held_out.run())
        return self._final is not None

    def _running(self) -> set[asyncio.Task[None]]:
        further = [task for task in (self._evaluation, self._final) if task is not None and not task.done()]
        return {*self._tasks, *further}

    def _state(self) -> EnvState:
        evaluating = self.held_out.progress if self.held_out is not None and self._final is not None else ""
        return self.tally.state(len(self._tasks)).model_copy(update={"evaluating": evaluating})

    def _room(self, status: StatusEnvReply) -> int:
        """Groups that the API lets us begin."""
        if status.room is not None:
            return status.room
        config = self.env.config
        if config.max_batches_offpolicy == 0:
            raise InvalidValueError(
                "max_batches_offpolicy = 0 needs a rollout API that knows what is in training; this one does not say.",
                hint="Use run-api of hermes-rl-mcp, or set max_batches_offpolicy to 1.",
            )
        per_batch: int = max(1, self._info.batch_size // config.group_size)
        steps_left = self._total_steps - status.current_step - status.batches_out
        held = status.queue_size + len(self._tasks)
        batches: int = min(steps_left, config.max_batches_offpolicy)
        return batches * per_batch - held

    def _capacity(self) -> int:
        """Groups that could be begun here now."""
        if time.monotonic() < self.maker.paused_until:
            return 0
        return self._workers() - len(self._tasks)

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

    async def _start_one(self, step: int) -> bool:
        failed = self.tally.failed
        item = await self._next_item()
        if item is None:
            if self.tally.failed == failed and not self._dry:
                log.info("get_next_item() has nothing at the moment; asking again until it has")
            self._dry = True
            return False
        self._dry = False
        self.ledger.begin(step)
        self._tasks.add(asyncio.create_task(self.maker.make(item, step)))
        return True

    async def _next_item(self) -> Any:
        """None = none at the moment. What the hook raises counts as a failed group."""
        limit_s = self.env.config.worker_timeout
        try:
            async with asyncio.timeout(limit_s) as scope:
                return await self.env.next_item()
        except Exception as error:  # noqa: BLE001 - user code; one item that could not be had is no reason to end a run
            late = RolloutsFailedError(f"get_next_item() gave nothing within worker_timeout = {limit_s:g} s")
            self.maker.failed(late if isinstance(error, TimeoutError) and scope.expired() else error)
            return None

    async def _wait(self, further: set[asyncio.Task[StatusEnvReply]], timeout_s: float) -> None:
        """Until something running or ``further`` ends, at most ``timeout_s``; what ended is taken note of."""
        watched: set[asyncio.Task[Any]] = {*self._running(), *further}
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

    async def _follow(self, before: int, step: int) -> None:
        """What a new trainer step brings: a metrics line, a checkpoint, now and then a position."""
        if step > before:
            if _crosses(before, step, self._checkpoint_interval):
                # Named like the trainer's checkpoint, even if several steps went by since the last look.
                self._save_position(step - step % self._checkpoint_interval)
            if self.tally.sent - self._sent_at_last_line >= self.env.config.min_items_sent_before_logging:
                await self._log_step()
        if step > self._position_seen and time.monotonic() - self._position_at >= POSITION_S:
            self._save_position(step)

    def _evaluate_if_due(self) -> None:
        if self._evaluation_due and self._evaluation is None and not self._must_finish_first():
            self._evaluation_due = False
            self._evaluation = asyncio.create_task(self._evaluate(self.env.curr_step))

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
            log.warning("the position at step %d could not be saved: %s", step, said(error), exc_info=error)
        passing = not self._checkpoint_interval or step % self._checkpoint_interval
        self._position = step if passing else None

    def _must_finish_first(self) -> bool:
        return bool(self._tasks) and self.env.config.eval_handling == EvalHandling.STOP_TRAIN

    async def _log_step(self) -> None:
        rewritten = {"rollouts/rewritten_turns": float(self.env.server.rewritten)} if self.env.server.rewritten else {}
        metrics = {**self.maker.taken(), **self.tally.metrics(), **rewritten, **self.env.server.server_metrics()}
        self._sent_at_last_line = self.tally.sent
        try:
            await self.env.wandb_log(metrics)
        except Exception as error:
            # User code; a metric that cannot be made is no reason to stop training.
            log.warning("wandb_log failed: %s", said(error), exc_info=error)

    async def _evaluate(self, step: int) -> None:
        try:
            async with asyncio.timeout(self.env.config.eval_timeout) as scope:
                report = await run_evaluation(self.env, step)
        except Exception as error:
            # User code; training goes on without it.
            if isinstance(error, TimeoutError) and scope.expired():
                error = TimeoutError(f"it took longer than eval_timeout = {self.env.config.eval_timeout:g} s")
            log.warning("evaluation at step %d failed: %s", step, said(error), exc_info=error)
            return
        if report.metrics:
            self.metrics.write(step, report.metrics)


def _crosses(before: int, step: int, interval: int) -> bool:
    return interval > 0 and step // interval > before // interval


def _check_sizes(group_size: int, batch_size: int) -> None:
    if batch_size > 0 and batch_size % group_size:
        raise InvalidValueError(
            f"batch_size {batch_size} is not a multiple of group_size {group_size}: no batch could ever be formed.",
            hint="Change batch_size or group_size.",
        )

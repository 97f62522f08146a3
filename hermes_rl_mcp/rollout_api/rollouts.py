"""What the rollout API decides: who may register, where a group goes, which groups are the next batch.

Invariant: every decision is an event that is recorded before it is applied; if it cannot be recorded nothing happened.
No HTTP. The clock and the source of ids are passed in. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from hermes_rl_mcp.contracts.rollout_api import (
    HealthReply,
    InfoReply,
    RegisterEnv,
    RegisterEnvReply,
    Registration,
    StatusReply,
    WandbInfoReply,
)
from hermes_rl_mcp.errors import HermesRLError, NotFoundError
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.batches import choose_batch, exact_subset, minimum_sequences
from hermes_rl_mcp.rollout_api.groups import FieldError, Group
from hermes_rl_mcp.rollout_api.journal import Journal
from hermes_rl_mcp.rollout_api.limits import Limits
from hermes_rl_mcp.rollout_api.pacing import Pace, in_order, must_wait, too_late
from hermes_rl_mcp.rollout_api.repetitions import Repetitions, Submission
from hermes_rl_mcp.rollout_api.state import BatchOut, State

log = logging.getLogger(__name__)

DEFAULT_ENV_NAME = "env"
KEPT_INTERVALS = 2
"""Checkpoint intervals for which trained batches are kept at most: one is needed, the second forgives a late word."""
WAIT_FOR_TRAINER = "wait for trainer to start"


class TrainerNotRegisteredError(HermesRLError):
    """A batch was asked for before anybody said how large one is."""

    def __init__(self) -> None:
        super().__init__("Trainer not registered. Call /register first.")


class UnavailableError(HermesRLError):
    """Right now nothing more can be stored; the client should try again later."""


class Rollouts:
    """One run's trajectory queue."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> None:
        self.limits = limits or Limits()
        self.state = State()
        self.refused = 0
        self.pace = Pace()
        self.changed: Callable[[], None] = lambda: None
        """Called after every change of the state."""
        self._journal = journal
        self._clock = clock
        self._new_id = new_id
        self._repetitions = Repetitions(self.limits, clock)
        self._handed_at: dict[str, float] = {}
        self._contacts: dict[int, float] = {}
        self._restored_at = -math.inf
        self._next_warning = -math.inf
        self._warned_of_kept = False
        if journal:
            self._restore(journal)

    def _restore(self, journal: Journal) -> None:
        for event in journal.read():
            self.state.apply(event)
            if isinstance(event, events.Submitted):
                self._repetitions.remember(event.digest, Submission(len(event.groups), 0, 0))
        journal.start()
        now = self._restored_at = self._clock()
        self._handed_at = dict.fromkeys(self.state.out, now)
        self._take_back(batch for batch in self.state.out.values() if not batch.leased)
        for env_id in list(self.state.buffers):
            self._release(env_id)
        if self.state.received or self.state.registration:
            log.info(
                "Journal restored: step %d, %d batches kept, %d groups waiting, %d leases, %d environments",
                self.state.step,
                len(self.state.kept),
                self.state.queue_size,
                len(self.state.out),
                len(self.state.environments),
            )

    def _commit(self, event: events.Event, *, already_true: bool = False) -> None:
        """``already_true``: it happened outside, so it counts even if it cannot be recorded."""
        if self._journal:
            try:
                self._journal.append(event)
            except OSError as error:
                if already_true:
                    log.error("The journal cannot be written (%s); after a restart this batch may come again", error)
                    self.state.apply(event)
                    self.changed()
                    return
                raise UnavailableError(
                    f"The journal cannot be written: {error}.", hint="Free some disk space; nothing was stored."
                ) from error
        self.state.apply(event)
        self.changed()

    def _tidy_journal(self) -> None:
        if self._journal and self._journal.needs_rewrite(self.state.live_bytes + self.state.kept_bytes):
            self._journal.rewrite(self.state.snapshot())

    # Trainer

    def register(self, registration: Registration) -> int:
        """The trainer's id. Unacknowledged batches come back; repeating a registration changes nothing else.

        Another registration sets the step. Batches kept behind ``starting_step`` come first then, each whole and in
        order; then those that were out, also whole; then the queue.
        """
        if not 1 <= registration.batch_size <= self.limits.batch_size:
            raise FieldError.one(
                ("batch_size",), f"is {registration.batch_size}; it must be 1 to {self.limits.batch_size} sequences"
            )
        for environment in self.live().values():
            _check_fit(registration.batch_size, environment.group_size, ("batch_size",))
        self._take_back(batch for batch in self.state.out.values() if batch.leased)
        known = self.state.registration
        if registration != known:
            if known is not None and registration.checkpoint_dir != known.checkpoint_dir:
                self._end_environments()
            before = self.state.live_groups + sum(
                len(batch.groups) for step, batch in self.state.kept.items() if step > registration.starting_step
            )
            self._say_if_fewer(registration.starting_step)
            number = self._new_id().int
            self._commit(events.Registered(registration, number, registration.starting_step))
            if lost := before - self.state.live_groups:
                log.warning(
                    "%d groups that came before the trainer are larger than its batch of %d sequences; dropped",
                    lost,
                    registration.batch_size,
                )
        return self.state.uuid

    def _end_environments(self) -> None:
        """Another run goes on with this journal: the environments in it are the old run's, and gone."""
        for env_id, environment in enumerate(self.state.environments):
            if environment.connected:
                self._commit(events.EnvDisconnected(env_id))

    def _say_if_fewer(self, starting_step: int) -> None:
        lacking = [step for step in range(starting_step + 1, self.state.step + 1) if step not in self.state.kept]
        if lacking and self.state.kept:
            log.warning(
                "The trainer starts at step %d; %d batches trained since then are no longer kept (steps %d to %d). "
                "It gets others in their place",
                starting_step,
                len(lacking),
                lacking[0],
                lacking[-1],
            )

    def hand_out(self, *, leased: bool) -> BatchOut | None:
        """The next batch, or None while none is complete. The caller must report ``written`` or ``not_written``."""
        registration = self.state.registration
        if registration is None:
            raise TrainerNotRegisteredError
        if not self.state.started:
            self._commit(events.Started())
        if leased:
            self._take_back(self._overdue())
        self._expire()
        seqs = self._next(registration.batch_size)
        if seqs is None:
            return None
        batch_id = self._new_id().hex
        self._commit(events.HandedOut(batch_id, leased, seqs))
        self._handed_at[batch_id] = self._clock()
        return self.state.out[batch_id]

    def _next(self, batch_size: int) -> tuple[int, ...] | None:
        if self.state.again:
            return tuple(self.state.again[0].groups)
        seqs = in_order(self.state.queue)
        groups = [self.state.queue[seq] for seq in seqs]
        chosen = choose_batch(
            [group.size for group in groups],
            [group.env_id for group in groups],
            batch_size,
            self.minimums(batch_size),
        )
        if chosen is None:
            self._warn_if_stuck(groups, batch_size)
            return None
        left = [group for index, group in enumerate(groups) if index not in set(chosen)]
        under_way = [] if self.crowded else self.pace.under_way(self.group_sizes())
        if must_wait(self._next_number, batch_size, left, under_way):
            return None
        return tuple(seqs[index] for index in chosen)

    @property
    def ready(self) -> bool:
        """Whether a batch can be handed out."""
        batch_size = self.state.batch_size
        return batch_size is not None and self._next(batch_size) is not None

    @property
    def _next_number(self) -> int:
        """Of the batch that is made next, counted from 0."""
        return self.state.step + self.batches_out

    @property
    def crowded(self) -> bool:
        """Half of what can be stored is in use: time that the trainer takes some of it."""
        state, limits = self.state, self.limits
        return state.live_bytes * 2 >= limits.queue_bytes or state.live_groups * 2 >= limits.queue_groups

    def _expire(self) -> None:
        if gone := too_late(self.state.queue, [batch.groups for batch in self.state.again], self._next_number):
            log.warning("%d groups are too old for batch %d (max_batches_offpolicy)", len(gone), self._next_number + 1)
            self._commit(events.Expired(gone))

    def _warn_if_stuck(self, groups: Sequence[Group], batch_size: int) -> None:
        sequences, now = sum(group.size for group in groups), self._clock()
        if sequences < batch_size or now < self._next_warning:
            return
        self._next_warning = now + self.limits.stuck_warning_s
        log.warning(
            "%d sequences wait in groups of %s, but none of them make a batch of exactly %d with the shares %s",
            sequences,
            sorted({group.size for group in groups}),
            batch_size,
            self.minimums(batch_size) or "of no environment",
        )

    def written(self, batch_id: str) -> None:
        """The response with this batch was written to the end."""
        batch = self.state.out.get(batch_id)  # gone after a reset, or returned when a trainer registered meanwhile
        if batch and not batch.leased:
            self._commit(events.Written(batch_id), already_true=True)
            self._handed_at.pop(batch_id, None)
            self._tidy_journal()

    def not_written(self, batch_id: str) -> None:
        """The client went away; the batch is the next one again."""
        if batch := self.state.out.get(batch_id):
            log.warning("A batch of %d groups could not be delivered; it is kept", len(batch.groups))
            self._take_back([batch])

    def acknowledge(self, lease_id: str, *, retain: bool = False) -> None:
        """The batch was trained. ``retain``: a trainer that registers with an earlier step gets it again."""
        batch = self.state.out.get(lease_id)
        if batch and batch.leased:
            self._commit(events.Acknowledged(lease_id, retain))
            self._handed_at.pop(lease_id, None)
            self._bound_kept()
            self._tidy_journal()
        elif lease_id not in self.state.acknowledged:
            raise NotFoundError(
                f"No lease '{lease_id}': it never was, or its batch went back to the queue because the trainer "
                "registered again, the lease ran out, or the server was reset.",
                hint="Ask for the next batch.",
            )

    def checkpointed(self, step: int) -> None:
        """Batches up to this step need not be kept."""
        if any(kept <= step for kept in self.state.kept):
            self._commit(events.Forgotten(step))
            self._tidy_journal()

    def _bound_kept(self) -> None:
        """The oldest goes: a resumed trainer then gets fewer of its batches again, and new ones in their place."""
        state, interval = self.state, self.state.registration.save_checkpoint_interval if self.state.registration else 0
        most = KEPT_INTERVALS * interval if interval > 0 else self.limits.kept_batches
        while len(state.kept) > most or (state.kept_bytes > self.limits.kept_bytes and len(state.kept) > 1):
            if not self._warned_of_kept:
                self._warned_of_kept = True
                log.warning(
                    "%d trained batches (%d bytes) are in no checkpoint yet; from here on the oldest are not kept, and "
                    "a resumed run trains on others in their place. Checkpoint more often to keep them all",
                    len(state.kept),
                    state.kept_bytes,
                )
            self._commit(events.Forgotten(min(state.kept)), already_true=True)

    def _overdue(self) -> list[BatchOut]:
        oldest = self._clock() - self.limits.lease_timeout_s
        return [b for b in self.state.out.values() if b.leased and self._handed_at[b.batch_id] <= oldest]

    def _take_back(self, batches: Iterable[BatchOut]) -> None:
        for batch in list(batches):
            self._commit(events.Returned(batch.batch_id), already_true=True)
            self._handed_at.pop(batch.batch_id, None)

    # Environments

    def register_env(self, request: RegisterEnv) -> RegisterEnvReply:
        registration = self.state.registration
        if request.group_size < 1:
            raise FieldError.one(("group_size",), f"is {request.group_size}; it must be at least 1")
        if registration:
            _check_fit(registration.batch_size, request.group_size, ("group_size",))
        if registration is None or not self.state.started:
            return RegisterEnvReply(status=WAIT_FOR_TRAINER)
        env_id = len(self.state.environments)
        if env_id >= self.limits.environments:
            raise UnavailableError(
                f"{env_id} environments are registered already.", hint="POST /reset_data forgets them."
            )
        name = request.desired_name or DEFAULT_ENV_NAME
        request = request.model_copy(update={"desired_name": name})
        wandb_name = self._free_name(name)
        self._commit(events.EnvRegistered(request, wandb_name))
        self._contacts[env_id] = self._clock()
        return RegisterEnvReply(
            status="success",
            env_id=env_id,
            wandb_name=wandb_name,
            checkpoint_dir=registration.checkpoint_dir,
            starting_step=self.state.step,
            checkpoint_interval=registration.save_checkpoint_interval,
            num_steps=registration.num_steps,
        )

    def _free_name(self, name: str) -> str:
        """An environment that takes the place of one that is gone goes on under its name."""
        taken = {self.state.environments[env_id].wandb_name for env_id in self.live()}
        return next(free for number in itertools.count() if (free := f"{name}_{number}") not in taken)

    def disconnect_env(self, env_id: int) -> bool:
        """Whether there is such an environment."""
        if not 0 <= env_id < len(self.state.environments):
            return False
        if self.state.environments[env_id].connected:
            self.pace.forget(env_id)
            self._commit(events.EnvDisconnected(env_id))
        return True

    def heard_of(self, env_id: int | None) -> None:
        """Any sign of life."""
        if env_id is not None and env_id < len(self.state.environments):
            self._contacts[env_id] = self._clock()

    def live(self) -> dict[int, RegisterEnv]:
        """Environments that are connected and were heard of lately, by id. After a restart of this server: since then,
        for the journal may be that of a run whose environment died with it."""
        since = self._clock() - self.limits.environment_silent_s
        return {
            env_id: environment.request
            for env_id, environment in enumerate(self.state.environments)
            if environment.connected and self._contacts.get(env_id, -math.inf) >= since
        }

    def group_sizes(self) -> dict[int, int]:
        """Of the live environments, by id."""
        return {env_id: request.group_size for env_id, request in self.live().items()}

    def awaits_reports(self) -> bool:
        """Shortly after a restart: environments of the journal may have groups under way, and have not said so."""
        now = self._clock()
        if now - self._restored_at > self.limits.report_after_restart_s:
            return False
        connected = {env_id for env_id, one in enumerate(self.state.environments) if one.connected}
        return bool(connected - self._contacts.keys())

    def minimums(self, batch_size: int) -> dict[int, int]:
        """Sequences that a batch must have of an environment."""
        shares = {
            env_id: (request.min_batch_allocation, request.group_size)
            for env_id, request in self.live().items()
            if request.min_batch_allocation is not None
        }
        return minimum_sequences(batch_size, shares)

    # Groups

    def submit(self, groups: Sequence[Group], digest: str) -> Submission:
        """Store all groups of one request, or none. ``digest`` identifies its body."""
        for env_id in {group.env_id for group in groups}:
            self.heard_of(env_id)
        if known := self._repetitions.known(digest):
            return known
        self._check(groups)
        placed = tuple(
            events.Placed(self.state.next_seq + offset, group, self._is_odd(group))
            for offset, group in enumerate(groups)
        )
        self._commit(events.Submitted(digest, placed))
        self.pace.received(groups)
        buffers = [p.group.env_id for p in placed if p.buffered and p.group.env_id is not None]
        for env_id in dict.fromkeys(buffers):
            self._release(env_id)
        left = sum(group.size for group in self.state.buffers[buffers[-1]].values()) if buffers else 0
        answer = Submission(len(groups), len(buffers), left)
        self._repetitions.remember(digest, answer)
        return answer

    def _check(self, groups: Sequence[Group]) -> None:
        batch_size = self.state.batch_size
        for index, group in enumerate(groups):
            if batch_size is not None and group.size > batch_size:
                place = (index, "tokens") if len(groups) > 1 else ("tokens",)
                raise FieldError.one(place, f"has {group.size} sequences; no batch of {batch_size} can ever hold it")
        limits, state = self.limits, self.state
        size = sum(len(group.raw) for group in groups)
        if state.live_bytes + size > limits.queue_bytes or state.live_groups + len(groups) > limits.queue_groups:
            raise UnavailableError(
                f"The queue is full: {state.live_groups} groups, {state.live_bytes} bytes.",
                hint="The trainer takes batches more slowly than groups arrive. Wait, then send again.",
            )

    def _is_odd(self, group: Group) -> bool:
        """Smaller than its environment's groups: waits for others with which it adds up."""
        environments = self.state.environments
        if group.env_id is None or group.env_id >= len(environments):
            return False
        return group.size < environments[group.env_id].request.group_size

    def _release(self, env_id: int) -> None:
        buffer = self.state.buffers[env_id]
        group_size = self.state.environments[env_id].request.group_size
        largest = self.state.batch_size or group_size
        while buffer:
            seqs = list(buffer)
            sizes = [group.size for group in buffer.values()]
            chosen = exact_subset(sizes, range(group_size, min(largest, sum(sizes)) + 1, group_size))
            if chosen is None:
                return
            self._commit(events.Released(env_id, tuple(seqs[index] for index in chosen)))

    # Everybody

    def reset(self) -> None:
        self._commit(events.Reset())
        self.pace.forget()
        self._repetitions.clear()
        self._handed_at.clear()
        self._contacts.clear()
        self._tidy_journal()

    def info(self) -> InfoReply:
        registration = self.state.registration
        if registration is None:
            return InfoReply(batch_size=-1, max_token_len=-1)
        return InfoReply(batch_size=registration.batch_size, max_token_len=registration.max_token_len)

    def wandb_info(self) -> WandbInfoReply:
        registration = self.state.registration
        if registration is None:
            return WandbInfoReply(group=None, project=None)
        return WandbInfoReply(group=registration.wandb_group, project=registration.wandb_project)

    def status(self) -> StatusReply:
        return StatusReply(current_step=self.state.step, queue_size=self.state.queue_size)

    @property
    def batches_out(self) -> int:
        """Leased and not acknowledged."""
        return sum(batch.leased for batch in self.state.out.values())

    def health(self, nonce: str) -> HealthReply:
        return HealthReply(
            status="ok",
            nonce=nonce,
            trainer_registered=self.state.registration is not None,
            trainer_started=self.state.started,
            environments=len(self.live()),
            current_step=self.state.step,
            queue_size=self.state.queue_size,
            batches_out=self.batches_out,
            groups_received=self.state.received,
            groups_rejected=self.refused,
        )


def _check_fit(batch_size: int, group_size: int, place: tuple[str, ...]) -> None:
    if batch_size % group_size == 0:
        return
    below = batch_size // group_size * group_size
    near = f"{below} or {below + group_size}" if below else f"{group_size}"
    raise FieldError.one(
        place,
        f"batch_size {batch_size} is not a multiple of group_size {group_size}, so no batch could ever be formed; "
        f"nearest batch_size for these groups: {near}",
    )

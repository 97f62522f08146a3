"""The state of the rollout API, and how each event changes it. No decisions, no clock, no HTTP, no disk.

Invariant: a stored group is in exactly one place: the queue, one environment's buffer, a batch that is out, one that
came back, or one that is trained and kept. A batch that was handed out once stays that batch, the same groups in the
same order, wherever it goes, until the batch size changes.
``current_step`` counts batches trained: a leased batch when it is acknowledged, another when it is handed out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.rollout_api import events
from hermes_rl_mcp.rollout_api.groups import Group

ACKNOWLEDGED_KEPT = 256
"""Lease ids remembered after their end, so that a repeated acknowledgement is answered as the first was."""


@dataclass(slots=True)
class Environment:
    request: RegisterEnv
    wandb_name: str
    connected: bool = True


@dataclass(slots=True)
class BatchOut:
    """A batch that left the queue and may still come back. ``groups`` by sequence number, in queue order."""

    batch_id: str
    leased: bool
    groups: dict[int, Group]
    turn: int = field(default=0, compare=False)
    """Batches come back in the order of their turns."""

    @property
    def size_bytes(self) -> int:
        return sum(len(group.raw) for group in self.groups.values())


@dataclass
class State:
    registration: Registration | None = None
    uuid: int = 0
    started: bool = False
    step: int = 0
    next_seq: int = 0
    received: int = 0
    environments: list[Environment] = field(default_factory=list)
    queue: dict[int, Group] = field(default_factory=dict)
    buffers: dict[int, dict[int, Group]] = field(default_factory=dict)
    out: dict[str, BatchOut] = field(default_factory=dict)
    again: list[BatchOut] = field(default_factory=list)
    """Came back, or are to be trained again; each is handed out whole, before anything from the queue."""
    kept: dict[int, BatchOut] = field(default_factory=dict)
    """Trained as this step, and in no checkpoint yet."""
    turns: int = field(default=0, compare=False)
    acknowledged: dict[str, None] = field(default_factory=dict)
    latest: Group | None = None
    live_bytes: int = 0
    """Of all stored groups but the kept ones."""
    kept_bytes: int = 0

    @property
    def live_groups(self) -> int:
        """Stored and not trained."""
        waiting = sum(len(buffer) for buffer in self.buffers.values())
        return self.queue_size + waiting + sum(len(batch.groups) for batch in self.out.values())

    @property
    def queue_size(self) -> int:
        return len(self.queue) + sum(len(batch.groups) for batch in self.again)

    def queued(self) -> Iterator[Group]:
        """What the next batches are made of, in order."""
        for batch in self.again:
            yield from batch.groups.values()
        yield from self.queue.values()

    def stored(self) -> Iterator[Group]:
        """All that is neither out nor trained."""
        yield from self.queued()
        for buffer in self.buffers.values():
            yield from buffer.values()

    @property
    def batch_size(self) -> int | None:
        return self.registration.batch_size if self.registration else None

    @singledispatchmethod
    def apply(self, event: object) -> None:
        raise TypeError(f"not an event: {event!r}")

    @apply.register
    def _(self, event: events.Registered) -> None:
        """Kept batches behind the step at which the trainer starts are ahead of it again; those before are covered."""
        ahead = [self.kept[step] for step in sorted(self.kept) if step > event.step]
        self.again = [*ahead, *self.again]
        self.live_bytes += sum(batch.size_bytes for batch in ahead)
        self.kept, self.kept_bytes = {}, 0
        self._number(self.again)
        if event.registration.batch_size != self.batch_size:
            for batch in reversed(self.again):
                self.queue = {**batch.groups, **self.queue}
            self.again = []
        self.registration, self.uuid, self.step = event.registration, event.uuid, event.step
        for place in (self.queue, *self.buffers.values()):
            for seq in [seq for seq, group in place.items() if group.size > event.registration.batch_size]:
                self.live_bytes -= len(place.pop(seq).raw)

    @apply.register
    def _(self, event: events.Started) -> None:
        self.started = True

    @apply.register
    def _(self, event: events.EnvRegistered) -> None:
        self.environments.append(Environment(event.request, event.wandb_name))

    @apply.register
    def _(self, event: events.EnvDisconnected) -> None:
        self.environments[event.env_id].connected = False

    @apply.register
    def _(self, event: events.Submitted) -> None:
        for placed in event.groups:
            group = placed.group
            if placed.buffered and group.env_id is not None:
                self.buffers.setdefault(group.env_id, {})[placed.seq] = group
            else:
                self._enqueue(placed.seq, group)
            self.live_bytes += len(group.raw)
            self.next_seq = max(self.next_seq, placed.seq + 1)
            self.received += 1

    @apply.register
    def _(self, event: events.Released) -> None:
        buffer = self.buffers[event.env_id]
        for seq in event.seqs:
            self._enqueue(seq, buffer.pop(seq))

    @apply.register
    def _(self, event: events.HandedOut) -> None:
        if self.again and event.seqs[0] in self.again[0].groups:
            back = self.again.pop(0)
            batch = BatchOut(event.batch_id, event.leased, back.groups, back.turn)
        else:
            groups = {seq: self.queue.pop(seq) for seq in event.seqs}
            batch = BatchOut(event.batch_id, event.leased, groups)
            self._number([batch])
        self.out[event.batch_id] = batch
        self.step += not event.leased

    @apply.register
    def _(self, event: events.Returned) -> None:
        batch = self.out.pop(event.batch_id)
        insort(self.again, batch, key=lambda batch: batch.turn)
        self.step -= not batch.leased

    @apply.register
    def _(self, event: events.Written) -> None:
        self.live_bytes -= self.out.pop(event.batch_id).size_bytes

    @apply.register
    def _(self, event: events.Acknowledged) -> None:
        batch = self.out.pop(event.batch_id)
        self.live_bytes -= batch.size_bytes
        self.step += 1
        if event.retain:
            self._keep(self.step, batch)
        self.acknowledged[event.batch_id] = None
        while len(self.acknowledged) > ACKNOWLEDGED_KEPT:
            del self.acknowledged[next(iter(self.acknowledged))]

    @apply.register
    def _(self, event: events.Kept) -> None:
        batch = BatchOut(event.batch_id, True, {seq: self.queue.pop(seq) for seq in event.seqs})
        self.live_bytes -= batch.size_bytes
        self._keep(event.step, batch)

    @apply.register
    def _(self, event: events.Forgotten) -> None:
        for step in [step for step in self.kept if step <= event.step]:
            self.kept_bytes -= self.kept.pop(step).size_bytes

    @apply.register
    def _(self, event: events.Expired) -> None:
        gone = set(event.seqs)
        for seq in gone & self.queue.keys():
            self.live_bytes -= len(self.queue.pop(seq).raw)
        for batch in [batch for batch in self.again if gone & batch.groups.keys()]:
            self.live_bytes -= batch.size_bytes
            self.again.remove(batch)

    @apply.register
    def _(self, event: events.Reset) -> None:
        fresh = State(next_seq=self.next_seq, received=self.received)
        self.__dict__.update(fresh.__dict__)

    @apply.register
    def _(self, event: events.Counted) -> None:
        self.step, self.next_seq, self.received = event.step, event.next_seq, event.received
        self.acknowledged = dict.fromkeys(event.acknowledged)

    def _enqueue(self, seq: int, group: Group) -> None:
        self.queue[seq] = group
        self.latest = group

    def _keep(self, step: int, batch: BatchOut) -> None:
        self.kept[step] = batch
        self.kept_bytes += batch.size_bytes

    def _number(self, batches: Iterable[BatchOut]) -> None:
        for batch in batches:
            batch.turn = self.turns
            self.turns += 1

    def snapshot(self) -> Iterator[events.Event]:
        """The shortest list of events that makes this state again (``latest`` may differ)."""
        if self.registration:
            yield events.Registered(self.registration, self.uuid, self.step)
        if self.started:
            yield events.Started()
        for env_id, environment in enumerate(self.environments):
            yield events.EnvRegistered(environment.request, environment.wandb_name)
            if not environment.connected:
                yield events.EnvDisconnected(env_id)
        for step, batch in self.kept.items():
            yield from _stored(batch.groups)
            yield events.Kept(batch.batch_id, step, tuple(batch.groups))
        for batch in sorted([*self.out.values(), *self.again], key=lambda batch: batch.turn):
            yield from _stored(batch.groups)
            yield events.HandedOut(batch.batch_id, batch.leased, tuple(batch.groups))
        for batch in self.again:
            yield events.Returned(batch.batch_id)
        yield from _stored(self.queue)
        for buffer in self.buffers.values():
            yield from _stored(buffer, buffered=True)
        yield events.Counted(self.step, self.next_seq, self.received, tuple(self.acknowledged))


def _stored(groups: Mapping[int, Group], buffered: bool = False) -> Iterator[events.Submitted]:
    for seq, group in groups.items():
        yield events.Submitted("", (events.Placed(seq, group, buffered),))

"""How old a group may be when it is trained on: who may begin how many, and when a batch has to wait.

A group begun when ``s`` batches were trained, by an environment with ``max_batches_offpolicy = n``, is to be one of the
batches up to ``s + n`` (counted from 0), its deadline. As every batch makes at most one policy version, its lag is then
at most n. Three rules see to it, the first two without loss:

- ``Pace.room``: groups stored and under way never are more than the batches before that deadline can take;
- ``must_wait``: no batch is put together without a group that is still under way, if it would then come too late;
- ``too_late``: what comes too late all the same (its environment was silent, no batch had a place for its size) is not
  trained on.

Groups without that note, of other people's environments, have no deadline. Invariant: nothing here changes the state
of the rollout API, and the ledgers can be rebuilt from what environments report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hermes_rl_mcp.contracts.rollout_api import EnvReport, RegisterEnv
from hermes_rl_mcp.rollout_api.groups import Group


class UnderWay(NamedTuple):
    """Groups that an environment is making."""

    deadline: int
    sequences: int


@dataclass(slots=True)
class _Ledger:
    """What is known of one environment's groups, by the step at which they were begun."""

    allowed: int
    begun: dict[int, int] = field(default_factory=dict)
    """Without those that were given up."""
    received: dict[int, int] = field(default_factory=dict)

    def under_way(self) -> dict[int, int]:
        return {step: left for step, count in self.begun.items() if (left := count - self.received.get(step, 0)) > 0}


class Pace:
    """The ledgers, in memory: after a restart an environment's next report fills them again."""

    def __init__(self) -> None:
        self._ledgers: dict[int, _Ledger] = {}

    def report(self, report: EnvReport) -> bool:
        """Takes note. True if fewer groups are under way than was known, which may be room for others."""
        before = self._ledgers.get(report.env_id)
        begun = {entry.step: entry.begun - entry.given_up for entry in report.groups}
        received = {
            entry.step: max(entry.sent, before.received.get(entry.step, 0) if before else 0) for entry in report.groups
        }
        ledger = self._ledgers[report.env_id] = _Ledger(report.max_batches_offpolicy, begun, received)
        return before is not None and sum(ledger.under_way().values()) < sum(before.under_way().values())

    def granted(self, env_id: int, step: int, count: int) -> None:
        """It was told to begin so many: they count as begun until it says what it did, or others would get them too."""
        begun = self._ledgers[env_id].begun
        begun[step] = begun.get(step, 0) + count

    def received(self, groups: Iterable[Group]) -> None:
        for group in groups:
            ledger = self._ledgers.get(group.env_id) if group.env_id is not None else None
            if ledger is not None and group.begun is not None:
                ledger.received[group.begun] = ledger.received.get(group.begun, 0) + 1

    def forget(self, env_id: int | None = None) -> None:
        """One environment, or all."""
        if env_id is None:
            self._ledgers.clear()
        else:
            self._ledgers.pop(env_id, None)

    def under_way(self, sizes: Mapping[int, int]) -> list[UnderWay]:
        """``sizes``: group size of each live environment."""
        return [
            UnderWay(step + ledger.allowed, count * sizes[env_id])
            for env_id, ledger in self._ledgers.items()
            if env_id in sizes
            for step, count in ledger.under_way().items()
        ]

    def allowed(self, live: Mapping[int, RegisterEnv]) -> int:
        """The smallest ``max_batches_offpolicy`` of these: the freshest wish holds for all, as they share batches. Who
        has not reported yet is taken at the word it registered with."""
        reported = (self._ledgers[env_id].allowed for env_id in live if env_id in self._ledgers)
        promised = (one.max_batches_offpolicy for one in live.values() if one.max_batches_offpolicy is not None)
        return min((*reported, *promised), default=0)

    def room(self, live: Mapping[int, RegisterEnv], stored: int, *, out: int, batch_size: int) -> int:
        """Sequences that may be begun now, by all live environments together. ``stored``: sequences neither trained nor
        out; ``out``: batches in training."""
        allowed = self.allowed(live)
        sizes = {env_id: request.group_size for env_id, request in live.items()}
        batches = min(allowed + 1 - out, max(1, allowed))
        return batches * batch_size - stored - sum(one.sequences for one in self.under_way(sizes))


def is_late(group: Group, batch: int) -> bool:
    """Whether batch number ``batch`` is beyond what the group's environment allows, in either direction: a run that
    goes on from a checkpoint may meet groups of a policy that it never gets to."""
    return group.begun is not None and group.allowed is not None and abs(batch - group.begun) > group.allowed


def too_late(queue: Mapping[int, Group], again: Sequence[Mapping[int, Group]], batch: int) -> tuple[int, ...]:
    """Sequence numbers of the waiting groups that batch number ``batch`` or, of those that came back as whole batches,
    their own turn is too late for."""
    alone = [seq for seq, group in queue.items() if is_late(group, batch)]
    whole = [
        seq
        for turn, groups in enumerate(again, batch)
        if any(is_late(group, turn) for group in groups.values())
        for seq in groups
    ]
    return (*alone, *whole)


def in_order(groups: Mapping[int, Group]) -> list[int]:
    """Sequence numbers, those begun first in front; without that note a group keeps its place behind the one before."""
    begun, keys = -1, {}
    for seq, group in groups.items():
        begun = begun if group.begun is None else group.begun
        keys[seq] = begun
    return sorted(keys, key=keys.__getitem__)


def must_wait(batch: int, batch_size: int, left: Sequence[Group], under_way: Sequence[UnderWay]) -> bool:
    """Whether a group under way would miss its deadline if batch number ``batch`` were made now and left it out.
    ``left``: the stored groups that are no part of it."""
    last = max((one.deadline for one in under_way), default=batch)
    for deadline in range(batch, last + 1):
        coming = sum(one.sequences for one in under_way if one.deadline <= deadline)
        due = [g for g in left if g.begun is not None and g.allowed is not None and g.begun + g.allowed <= deadline]
        if coming and coming + sum(group.size for group in due) > (deadline - batch) * batch_size:
            return True
    return False

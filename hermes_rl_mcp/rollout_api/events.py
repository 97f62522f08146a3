"""Everything that can change the state of the rollout API, as values. Each says what was decided, not what was asked.

Invariant: the state is a function of the events applied in order, so a journal of them is enough to restore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hermes_rl_mcp.contracts.rollout_api import RegisterEnv, Registration
from hermes_rl_mcp.rollout_api.groups import Group


@dataclass(frozen=True, slots=True)
class Registered:
    """A trainer takes over at ``step``: batches kept behind it are to be trained again. Groups larger than its batch
    go."""

    registration: Registration
    uuid: int
    step: int


@dataclass(frozen=True, slots=True)
class Started:
    """The trainer asked for its first batch; environments may register."""


@dataclass(frozen=True, slots=True)
class EnvRegistered:
    """Its id is the number of those before it."""

    request: RegisterEnv
    wandb_name: str


@dataclass(frozen=True, slots=True)
class EnvDisconnected:
    env_id: int


@dataclass(frozen=True, slots=True)
class Placed:
    """One group of a submission. ``buffered``: it waits until its environment's odd-sized groups add up."""

    seq: int
    group: Group
    buffered: bool


@dataclass(frozen=True, slots=True)
class Submitted:
    """All groups of one request: stored together or not at all."""

    digest: str
    groups: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """Buffered groups whose sizes add up move to the end of the queue."""

    env_id: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A batch leaves the queue: under a lease until acknowledged, else until the response is written."""

    batch_id: str
    leased: bool
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """A batch that was not received is handed out again, whole, before the queue."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Written:
    """The response with this batch was written; without a lease that ends its life here."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A batch was trained. ``retain``: it is kept until a checkpoint covers its step."""

    batch_id: str
    retain: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a retaining ``Acknowledged`` came to, in a rewritten journal: these queued groups were trained as a step."""

    batch_id: str
    step: int
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Kept batches up to this step go."""

    step: int


@dataclass(frozen=True, slots=True)
class Expired:
    """Waiting groups that are too old to be trained on go, or a whole batch that came back."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Back to a fresh server."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters that the other events of a rewritten journal no longer add up to."""

    step: int
    next_seq: int
    received: int
    acknowledged: tuple[str, ...]


Event: TypeAlias = (
    Registered
    | Started
    | EnvRegistered
    | EnvDisconnected
    | Submitted
    | Released
    | HandedOut
    | Returned
    | Written
    | Acknowledged
    | Kept
    | Forgotten
    | Expired
    | Reset
    | Counted
)

"""``vitals.json`` and ``env_state.json``: what a run's processes do right now, for readers that cannot ask them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hermes_rl_mcp.contracts.runs import ProcessName


class ProcessVitals(BaseModel):
    """One process, as its own server or its files tell."""

    model_config = ConfigDict(extra="forbid")

    answers: bool | None = None
    """Whether its health endpoint answered; None = it has none, or is not started."""
    state: str | None = None
    """The kernel's word for it: ``running``, ``sleeping``, ``stopped`` (SIGSTOP), ``disk-sleep``, ``zombie``."""
    doing: str = ""
    """In words: 'training, 32 sequences', 'waiting for batches'."""
    memory_bytes: int | None = None
    """Resident set, its descendants included."""


class Vitals(BaseModel):
    """``vitals.json``, replaced by the supervisor every few seconds and at every change. Never needed to go on."""

    model_config = ConfigDict(extra="forbid")

    time: str
    """ISO 8601, UTC."""
    step: int = 0
    running_seconds: float = 0.0
    """Monotonic, since all three were ready."""
    queue_size: int | None = None
    """Groups that wait in the rollout API; None = it does not answer."""
    batches_out: int | None = None
    environments: int | None = None
    groups_received: int | None = None
    groups_rejected: int | None = None
    activity: int | None = None
    """The trainer's counter of work done (SamplingHealth.activity)."""
    idle_s: float = 0.0
    """Monotonic seconds since any of the figures above changed."""
    waiting: str = ""
    """Which process waits for what, in one sentence."""
    processes: dict[ProcessName, ProcessVitals] = Field(default_factory=dict)
    memory_bytes: int | None = None
    """Of all three and their descendants, now."""
    peak_memory_bytes: int | None = None
    """The largest ``memory_bytes`` so far."""
    disk_free_bytes: int | None = None
    """For this user on the fullest of the file systems that the run writes to."""


class EnvState(BaseModel):
    """``env_state.json``: the environment's count of groups, replaced at most once a second, and at a first failure."""

    model_config = ConfigDict(extra="forbid")

    time: str
    sent: int = 0
    failed: int = 0
    """Groups whose rollouts raised."""
    dropped: int = 0
    """Groups made but not fit to send."""
    unusable_in_a_row: int = 0
    """Failed or dropped since the last group that was sent."""
    first_error: str = ""
    """The first of that row. Untrusted text."""
    first_reason: str = ""
    """Its kind: ``failed`` (an exception), ``no_score``, or why it was dropped (``too_long``, ``refused``, ...)."""
    running: int = 0
    """Groups being made now."""
    evaluating: str = ""
    """How far the evaluation at the end is ('base: 34 of 190 answers'); empty while there is none."""

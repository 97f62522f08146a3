"""The wire of port 8000: Atropos' trajectory API, exact names, plus leases and health.

Sentinels of that wire: ``masks`` hold -100 on positions that are not trained and the token id elsewhere;
``inference_logprobs`` hold 1.0 where there is none; a teacher that says nothing has no candidates, never logprob 0.0.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MASKED = -100
NO_LOGPROB = 1.0
NO_CANDIDATE = -1
"""In ``distill_token_ids``: fills a row up to the width of others; its logprob means nothing. An empty row, or an empty
list for a whole sequence, says the same more shortly: no teacher here."""
TRAINED_FLAG = 1
"""In a mask, of older clients, instead of the token id. Harmless: only -100 means not trained."""


class Registration(BaseModel):
    """Trainer to API, ``POST /register``. ``batch_size`` counts sequences.

    A registration that differs from the last one sets the API's step to ``starting_step``. Batches that were retained
    behind it come first then, each whole and in order; next those that were out under a lease; then the queue. The same
    registration again (its answer was lost) only brings the leased batches back.
    """

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int
    attempt: str | None = None
    """Ours: names one trainer process. It may repeat its registration at any time and goes on where it is; another
    process, even with the same values, begins at ``starting_step``."""


class RegistrationReply(BaseModel):
    uuid: int


class RegisterEnv(BaseModel):
    """Environment to API, ``POST /register-env``."""

    max_token_length: int
    desired_name: str | None = None
    weight: float
    group_size: int
    min_batch_allocation: float | None = None
    max_batches_offpolicy: int | None = Field(None, ge=0)
    """Not in Atropos. It holds for all from here on, not only from the first report."""


class RegisterEnvReply(BaseModel):
    """Only ``status`` (``wait for trainer to start``) before the trainer's first ``GET /batch``."""

    status: str
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None


class EnvIdentifier(BaseModel):
    env_id: int


class BegunGroups(BaseModel):
    """Groups that an environment began when ``step`` batches were trained, counted since it registered."""

    step: int = Field(ge=0)
    begun: int = Field(ge=0)
    given_up: int = Field(0, ge=0)
    """Of these: failed or dropped, never to be sent."""
    sent: int = Field(0, ge=0)
    """Of these: sent, and the answer has come."""


class EnvReport(BaseModel):
    """Ours, as JSON in ``GET /status-env?env_id=N&report=...``: what an environment has under way. The answer then
    has ``room``, and may be waited for."""

    env_id: int
    max_batches_offpolicy: int = Field(ge=0)
    last_step: int
    """Steps that it makes groups for."""
    groups: list[BegunGroups] = Field(default_factory=list, max_length=1000)
    """Steps of which nothing is under way may be missing."""
    wants: int = Field(0, ge=0)
    """Groups that it could begin now. What it is given room for counts as begun until its next report."""
    known_step: int | None = None
    """The ``current_step`` that it knows."""
    wait_s: float = Field(0.0, ge=0, le=60)
    """Answer only when there is room and it wants some, or the step is another; at the latest after this long."""


class ScoredData(BaseModel):
    """One group of G sequences. Unknown keys are dropped, absent ones are null: 14 keys always go out."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[list[int]]
    """[G][T] prompt and completion."""
    masks: list[list[int]]
    """[G][T]."""
    scores: list[float]
    """[G]."""
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    """[G][T]."""
    overrides: list[dict[str, Any]] | None = None
    """[G] per-sequence extras: Atropos' ``set_advantage_to_zero`` and ``temperature``, and ``SequenceNotes``."""
    group_overrides: dict[str, Any] | None = None
    images: Any | None = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    """[G][T][K] a teacher's candidates for the token at each position. K may differ from position to position; [] where
    the teacher says nothing, for a position or for a whole sequence."""
    distill_logprobs: list[list[list[float]]] | None = None
    """[G][T][K] the teacher's logprobs of them at temperature 1, nats."""


class SequenceNotes(BaseModel):
    """Keys that our environments add to each entry of ``ScoredData.overrides``; an Atropos trainer ignores them."""

    model_config = ConfigDict(extra="ignore")

    policy_version: int | None = None
    """Of the sampler when it produced the sequence's first token."""
    finish_reason: Literal["stop", "length"] | None = None
    reward_parts: dict[str, float] = Field(default_factory=dict)
    """Named, unweighted parts of the score: {'correct': 1.0, 'format': 1.0}."""
    parse_failed: bool | None = None
    """Whether the answer was not of the form that was asked for; null where nobody looked."""
    temperature: float | None = None
    set_advantage_to_zero: bool = False


class GroupNotes(BaseModel):
    """Keys that our environments add to ``ScoredData.group_overrides``."""

    model_config = ConfigDict(extra="ignore")

    group_id: str | None = None
    """Makes groups that happen to hold the same samples differ."""
    begun_step: int | None = Field(None, ge=0)
    """Batches that were trained when its sampling began."""
    max_batches_offpolicy: int | None = Field(None, ge=0)
    """It is not to be trained on later than that many batches behind ``begun_step``."""


class BatchReply(BaseModel):
    """``GET /batch``. ``batch`` is null while no batch is complete. ``lease_id`` only when ``?lease=1`` was asked; with
    ``&wait_s=0.5`` the answer may take so long if it is null (ours, at most 60)."""

    batch: list[ScoredData] | None
    lease_id: str | None = None


class AcknowledgeRequest(BaseModel):
    """``POST /acknowledge``: the batch of this lease was trained and must not come again."""

    lease_id: str
    retain: bool = False
    """Keep the batch in the journal until ``POST /checkpointed`` covers its step: a run that is resumed from an earlier
    checkpoint gets the very same batches again."""


class CheckpointedRequest(BaseModel):
    """``POST /checkpointed``, ours: batches up to this step are in a checkpoint and need not be kept."""

    step: int


class StatusReply(BaseModel):
    current_step: int
    queue_size: int


class StatusEnvReply(BaseModel):
    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    batches_out: int = 0
    """Ours: batches under lease, being trained; neither in ``queue_size`` nor yet in ``current_step``."""
    room: int | None = None
    """Ours, and only in answer to an ``EnvReport``: groups that may be begun now."""


class InfoReply(BaseModel):
    batch_size: int
    max_token_len: int


class WandbInfoReply(BaseModel):
    group: str | None
    project: str | None


class HealthReply(BaseModel):
    """``GET /health``, ours. ``environments`` counts live registered environments."""

    status: Literal["ok"]
    nonce: str
    trainer_registered: bool
    trainer_started: bool
    environments: int
    current_step: int
    queue_size: int
    batches_out: int = 0
    """Leased and not acknowledged: in training now."""
    groups_received: int
    groups_rejected: int

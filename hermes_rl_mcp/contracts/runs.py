"""The life of a run as it is written to disk."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from hermes_rl_mcp.contracts.config import Ports, TrainerConfig
from hermes_rl_mcp.contracts.estimates import Estimate

SCHEMA_VERSION = 1
"""Of ``request.json`` and ``run.json``. A reader shows a record of a later version as ``unreadable``."""

ProcessName = Literal["api", "trainer", "env"]
START_ORDER: tuple[ProcessName, ...] = ("api", "trainer", "env")
STOP_ORDER: tuple[ProcessName, ...] = ("env", "trainer", "api")


class RunStatus(StrEnum):
    """States of a run. Terminal ones absorb."""

    QUEUED = "queued"
    """A supervisor waits for the device."""
    STARTING = "starting"
    """Processes are being started, each after the one before is ready."""
    RUNNING = "running"
    """All three processes are ready."""
    STOPPING = "stopping"
    """A stop was asked for and is being carried out."""
    STOPPED = "stopped"
    """Ended because somebody asked for it."""
    COMPLETED = "completed"
    """The trainer left its completion record, and exited 0 or was made to exit after that record."""
    FAILED = "failed"
    """A process ended or a deadline passed; ``error`` says which was first and why."""
    INTERRUPTED = "interrupted"
    """The supervisor is gone without proof of how the run ended (crash, reboot)."""

    @property
    def terminal(self) -> bool:
        return self in _TERMINAL


_TERMINAL = {RunStatus.STOPPED, RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.INTERRUPTED}
UNREADABLE = "unreadable"
"""Label a reader gives to a run whose record is damaged, gone or from a later version; never written."""
UNKNOWN = "unknown"
"""Label a reader gives to a run whose record cannot be read now, though it may be in order; never written."""


def has_ended(status: str) -> bool:
    """Whether nothing more will come of a run that is shown with this status."""
    return status == UNREADABLE or (status in set(RunStatus) and RunStatus(status).terminal)


class Identity(BaseModel):
    """Names one process for good: pids are reused, this triple is not."""

    pid: int
    started_at: float
    """Kernel start time of the process in seconds: since boot on Linux (setting the clock does not move it), else since
    the epoch. Only ever compared for equality."""
    boot_id: str


class ProcessRecord(BaseModel):
    """One child of the supervisor. All None until it was started."""

    model_config = ConfigDict(extra="forbid")

    identity: Identity | None = None
    ready: bool = False
    exit_code: int | None = None
    """From the supervisor's own wait; negative = killed by that signal."""
    forced: bool = False
    """The supervisor made it exit."""
    log: str


class RunRecord(BaseModel):
    """``run.json``: what the supervisor knows, replaced atomically at every change."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    revision: int = 0
    """Rises by one with every write."""
    run_id: str
    environment: str
    base_model: str
    profile: str
    status: RunStatus
    detail: str = ""
    """What it is doing now, in words: 'waiting for the trainer to load the model'."""
    error: str | None = None
    hint: str | None = None
    created_at: str
    """ISO 8601, UTC."""
    running_since: str | None = None
    ended_at: str | None = None
    running_seconds: float = 0.0
    """Monotonic seconds since all three were ready, as of the last write."""
    running_clock: float | None = None
    """The monotonic clock when all three were ready; good on the supervisor's boot only."""
    total_steps: int
    group_size: int
    batch_size: int
    wandb_project: str
    wandb_run_name: str
    supervisor: Identity | None = None
    ports: Ports | None = None
    processes: dict[ProcessName, ProcessRecord]
    stop_reason: str | None = None
    device: str = "cpu"
    queue_position: int | None = None
    leftover_pids: list[int] = Field(default_factory=list)
    """Processes that could not be confirmed gone."""
    versions: dict[str, str] = Field(default_factory=dict)
    stalled: bool = False
    """Nothing has moved for ``Limits.stall_s``; see ``stalled_reason``. Taken back when something moves again."""
    stalled_reason: str | None = None
    """Which process waits for what, its last log line and the queue's depth."""
    resumed_from: str | None = None
    """Run whose checkpoint this one continues."""
    resumed_step: int | None = None
    startup_seconds: float | None = None
    """From having the device to ``running``, monotonic."""
    peak_memory_bytes: int | None = None
    """Largest resident set of all processes of the run together that was seen."""
    disk_bytes: int | None = None
    """Run directory and logs, measured at the end."""


class Starter(BaseModel):
    """Who asked for something that goes on without them, as far as a client says who it is."""

    client: str
    """The name that the MCP client gives itself, or ``PROGRAM``."""
    version: str = ""
    server: Identity | None = None
    """The process that was asked; what is started does not need it any more."""


PROGRAM = "a program"
"""In place of a client's name: the command line, or Python."""


class RunRequest(BaseModel):
    """``request.json``: all the launcher decided. The supervisor makes ``config.yaml`` of it once it has ports."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created_at: str
    environment: str
    env_file: str
    env_class: str
    env_base: Literal["hermes_rl_mcp", "atroposlib"] = "hermes_rl_mcp"
    env_sha256: str
    profile: str
    base_model: str
    model_path: str
    tokenizer_name: str
    server_type: Literal["vllm", "sglang"] = "vllm"
    server_values: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of the server entry (timeout, weight, ...)."""
    device: Literal["cpu", "cuda"] = "cpu"
    env: dict[str, JsonValue]
    trainer: TrainerConfig
    idempotency_key: str | None = None
    resume_from: str | None = None
    """Run that this one continues; its checkpoint of ``resume_step`` was copied into this run's directory."""
    resume_step: int | None = None
    estimate: Estimate | None = None
    """What was said before the start."""
    started_by: Starter | None = None
    """None in requests of earlier versions."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class StopRequest(BaseModel):
    """``stop.json``, written before the first signal."""

    reason: str
    requested_at: str


class ChildReport(BaseModel):
    """What a child says about its own end, written last, atomically. For the trainer this is the completion record."""

    model_config = ConfigDict(extra="forbid")

    process: ProcessName
    status: Literal["completed", "failed"]
    step: int = 0
    error: str | None = None
    """One sentence, for people."""
    hint: str | None = None
    """What to change."""
    finished_at: str
    stays_s: float = Field(0.0, ge=0)
    """Of a trainer that completed: the longest that it stays up after this record, so that the environment can evaluate
    what it learned. All is saved by then, so an end of any kind in that time is still one of a completed run."""
    detail: dict[str, JsonValue] = Field(default_factory=dict)


class Event(BaseModel):
    """One line of ``events.jsonl``."""

    seq: int
    time: str
    status: RunStatus
    reason: str

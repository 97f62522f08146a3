"""Parts of a run that an answer includes on request: the same pages for tools, resources and the dashboard.

A page says where it begins, whether it was cut, and at which ``offset`` the next one goes on.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, JsonValue

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.records import RolloutLine
from hermes_rl_mcp.contracts.runs import Event

SectionName = Literal["metrics", "rollouts", "log", "plot", "checkpoints", "diagnosis", "events", "config"]
LogName = Literal["api", "trainer", "env", "supervisor"]


class Page(BaseModel):
    """Rows ``offset`` to ``offset + len(rows)`` of ``total``; of a log these are bytes of the file."""

    total: int
    offset: int
    truncated: bool = False
    """There is more after this page."""
    next_offset: int | None = None
    """Where to go on; null at the end."""


class MetricsPage(Page):
    """Lines of ``metrics.jsonl``. Without an offset asked for they are spread evenly over all steps, first and last
    included, and nothing is ``truncated``: a row of the whole run is no beginning of it."""

    rows: list[dict[str, JsonValue]]
    spread: bool
    key_metrics_only: bool = False
    """The others are left out, so that the rows cover the run; an offset shows all of them."""


class RolloutsPage(Page):
    """Scored rollouts as sampled: untrusted text."""

    rows: list[RolloutLine]


class EventsPage(Page):
    """Changes of state with their reasons, oldest first."""

    rows: list[Event]


class LogPage(Page):
    """A window of one process's log: untrusted text."""

    process: LogName
    text: str


class TextPage(Page):
    """Part of a file; offsets are in characters."""

    text: str


class CheckpointInfo(BaseModel):
    """One finished checkpoint."""

    step: int
    path: str
    policy_version: int
    created_at: str
    size_bytes: int


class CheckpointsPage(Page):
    rows: list[CheckpointInfo]


class Diagnosis(BaseModel):
    """What is wrong, with the evidence: untrusted text in it comes from logs."""

    flags: list[Flag]
    waiting: str
    """Which process waits for what."""
    stalled: bool
    stalled_reason: str | None
    error: str | None
    hint: str | None
    last_log_lines: dict[str, list[str]]
    """By process, of those that wrote anything."""


class PlotInfo(BaseModel):
    """Where the drawn curves are; an answer of a tool carries the picture itself besides."""

    uri: str
    steps: int
    curves: list[str]
    """Metric names that had values to draw."""
    error: str | None = None
    """Why there is no picture."""


class Sections(BaseModel):
    """What was included; the rest is null."""

    metrics: MetricsPage | None = None
    rollouts: RolloutsPage | None = None
    log: LogPage | None = None
    plot: PlotInfo | None = None
    checkpoints: CheckpointsPage | None = None
    diagnosis: Diagnosis | None = None
    events: EventsPage | None = None
    config: TextPage | None = None
    """``config.yaml``, secrets masked."""
    missing: dict[str, str] = Field(default_factory=dict)
    """Parts that cannot be read, and why."""


class SectionQuery(BaseModel):
    """Which part of a section. ``offset`` below 0 asks for the end (for metrics: an even spread)."""

    offset: int = -1
    limit: int = Field(0, ge=0)
    """Rows, or bytes of a log; 0 = the section's own default."""
    step: int | None = None
    """Rollouts of this step alone."""
    process: LogName = "trainer"
    """Whose log."""

"""What a run will take, said before it starts, and what it took, said after."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Estimate(BaseModel):
    """A forecast. Figures are for the whole run unless the name says otherwise; None = it could not be told."""

    model_config = ConfigDict(extra="forbid")

    memory_bytes: int
    """Peak resident memory of the run's processes."""
    gpu_memory_bytes: int | None = None
    """Peak GPU memory; null on a CPU."""
    disk_bytes: int
    """Run directory and logs at the end, and a model that has yet to be fetched."""
    seconds_per_step: float | None
    startup_seconds: float | None
    total_seconds: float | None
    """Start-up and all steps that are left."""
    sampled_tokens: int
    basis: str
    """What the figures rest on: 'an earlier run of this model here', 'a measurement of this machine', ..."""


class Actual(BaseModel):
    """The same figures as measured."""

    model_config = ConfigDict(extra="forbid")

    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    disk_bytes: int | None = None
    seconds_per_step: float | None = None
    """Median of time/step_s."""
    startup_seconds: float | None = None
    total_seconds: float | None = None
    sampled_tokens: int | None = None

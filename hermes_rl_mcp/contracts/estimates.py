"""What a run will take, said before it starts, and what it took, said after."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """What of a decoder model decides how much memory and time it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    """The output head is the embedding, so it takes no memory of its own."""

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the matrices of one layer, all of which get LoRA."""
        hidden, inner, keys = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        queries = self.heads * self.head_dim
        return (
            *((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)),
            *((hidden, inner), (hidden, inner), (inner, hidden)),
        )

    @property
    def parameters(self) -> int:
        layer = sum(inputs * outputs for inputs, outputs in self.linears)
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linears)


class SpeedRequest(BaseModel):
    """What ``python -m trainer.calibrate`` is asked to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Shape
    device: Literal["cpu", "cuda"]
    threads: int
    """0 = all cores."""
    lora_rank: int
    rows: int
    """Completions that are decoded together."""
    context: int
    """Tokens a completion looks back on, about."""
    train_tokens: int
    """Padded tokens of one pass in training."""


class Speed(BaseModel):
    """Its answer: seconds for parts of the work of the whole model."""

    model_config = ConfigDict(extra="forbid")

    pass_s: float
    """One token for every row, whatever the number of rows."""
    row_s: float
    """What each row adds to a pass."""
    prefill_token_s: float
    train_token_s: float
    """Forward and backward, without the head."""
    head_token_s: float
    """Logprob of a trained token and its gradient."""
    import_s: float
    """Loading torch: how fast this machine starts Python programs."""
    measured_at: str = ""
    """ISO 8601, UTC."""


class Estimate(BaseModel):
    """A forecast. Figures are for the whole run unless the name says otherwise; None = it could not be told."""

    model_config = ConfigDict(extra="forbid")

    memory_bytes: int
    """Peak resident memory of the run's processes."""
    gpu_memory_bytes: int | None = None
    """Peak GPU memory; null on a CPU."""
    disk_bytes: int
    """Run directory and logs at the end, and a model that has yet to be fetched."""
    fetch_bytes: int = Field(0, ge=0)
    """That model alone; what the run is said to have taken afterwards leaves it out."""
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

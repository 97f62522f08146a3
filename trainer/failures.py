"""How a training run can end badly, in sentences for people."""

from __future__ import annotations

from hermes_rl_mcp.errors import HermesRLError


class TrainingFailedError(HermesRLError):
    """The run cannot go on; the sentence names the step, the hint what to change."""


class CheckpointError(HermesRLError):
    """A checkpoint could not be written; earlier ones are intact."""

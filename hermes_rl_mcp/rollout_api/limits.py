"""Every bound and deadline of the rollout API, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Defaults fit one machine that trains one model."""

    body_bytes: int = 128 * MIB
    """A request, before and after inflating. 16 sequences of 32k tokens with logprobs are about 17 MiB."""
    control_bytes: int = MIB
    """A request that carries no groups."""
    queue_bytes: int = 1024 * MIB
    """Of groups held in memory. Past half of it environments are told to pause, past all of it posting gets 503."""
    queue_groups: int = 20_000
    """As ``queue_bytes``, for very small groups; also bounds the time it takes to put a batch together."""
    kept_bytes: int = 1024 * MIB
    """Of batches that are trained and in no checkpoint yet. Apart from ``queue_bytes``: they push nobody back."""
    kept_batches: int = 100
    """As ``kept_bytes``, for a trainer that does not say how often it makes a checkpoint."""
    batch_size: int = 65_536
    """Largest that a trainer may ask for; bounds the memory it takes to put a batch together."""
    environments: int = 4096
    """Registrations since the last reset: one restarted in a loop must not fill the memory."""
    lease_timeout_s: float = 600.0
    """A trainer that asks again this long after it got a batch without acknowledging it has lost the answer. Longer
    than an optimizer step takes, so that one who fetches ahead is not given the batch it is training."""
    environment_silent_s: float = 120.0
    """Without contact for so long an environment counts as gone. They poll ten times a second, but an evaluation can
    keep one from polling for a while."""
    report_after_restart_s: float = 10.0
    """For so long after a restart no environment is given room before all have said what they have under way. They try
    again within 2 s."""
    duplicate_window_s: float = 150.0
    """A client repeats a post whose answer it did not get: Atropos' BaseEnv three times in about 3 s, our environments
    every 30 s (their timeout) for 120 s."""
    duplicate_repeats: int = 4
    """How often one body is taken for such a repetition. A policy that always says the same posts equal groups too."""
    stuck_warning_s: float = 60.0
    """Between two log lines that say that the waiting groups are enough in number and still fit no batch."""
    write_stall_s: float = 60.0
    """A client that reads nothing of its batch for so long is taken for gone."""
    retry_after_s: int = 5
    """In ``Retry-After`` with 503: about the time of a short training step, which frees room."""

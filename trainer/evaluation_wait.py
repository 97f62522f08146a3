"""How long a trainer that has completed stays up for the evaluation of what it learned.

Invariant: every wait here ends: with the result on disk, at a signal, when the sampler has failed, when nothing moves
any more, and in any case after the time that the completion record named. Whatever ends it, the run is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Protocol

from hermes_rl_mcp.contracts.config import RunConfig

LEAST_S = 600.0
"""Time that is allowed in any case; longer runs allow as long as they took."""
FIRST_SIGN_S = 60.0
"""For the environment's first request. It looks about once a second; some load their items first."""
QUIET_S = 600.0
"""Without any sampling: all of its open items may be with a judge, for at most ``worker_timeout``, by default this."""
_POLL_S = 0.05

_log = logging.getLogger(__name__)


class Sampling(Protocol):
    @property
    def activity(self) -> int: ...
    @property
    def failure(self) -> Exception | None: ...


def is_expected(config: RunConfig, evaluation: Path) -> bool:
    """Whether the environment may evaluate: it is ours, is not told not to, and has not said yet that it will not."""
    return config.run.env_base == "hermes_rl_mcp" and config.env.get("eval_items", 0) != 0 and not evaluation.exists()


def bound_s(run_s: float) -> float:
    """The longest stay after a run of this length."""
    return max(LEAST_S, run_s)


def wait(
    evaluation: Path,
    sampling: Sampling,
    leave: Event,
    limit_s: float,
    *,
    first_sign_s: float = FIRST_SIGN_S,
    quiet_s: float = QUIET_S,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Returns once there is no more to wait for, and says why."""
    began = moved = clock()
    seen = sampling.activity
    idle_s = first_sign_s
    while not leave.wait(_POLL_S):
        if evaluation.exists():
            return "the evaluation is done"
        if sampling.failure is not None:
            return "the sampler has failed"
        now = clock()
        if sampling.activity != seen:
            seen, moved, idle_s = sampling.activity, now, quiet_s
        if now - began > limit_s:
            return f"the evaluation was not done within {limit_s:.0f} s"
        if now - moved > idle_s:
            return f"nothing was asked for evaluation for {idle_s:.0f} s"
    return "asked to end"

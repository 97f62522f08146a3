"""What one environment is told about the queue: ``/status-env``.

Invariant: every number is finite and in its range, whatever weights and minimums the environments registered with.
"""

from __future__ import annotations

import math

from hermes_rl_mcp.contracts.rollout_api import EnvReport, RegisterEnv, StatusEnvReply
from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.rollout_api.rollouts import Rollouts

LARGEST_FACTOR = 10**9
"""Of a weight or a length that an environment names; keeps their products and sums finite."""
MIN_WEIGHT = 0.01
"""Floor of ``env_weight``, so that no environment is starved altogether."""


def env_status(rollouts: Rollouts, env_id: int, report: EnvReport | None = None) -> StatusEnvReply:
    """Raises NotFoundError for an id that /register-env never gave, or with a report that has been taken back. Counts
    as a sign of life. ``report`` must be in the ledgers already."""
    state = rollouts.state
    if not 0 <= env_id < len(state.environments):
        raise NotFoundError(
            f"No environment has the id {env_id}; {len(state.environments)} are registered.",
            hint="POST /register-env first; ids do not survive a reset.",
        )
    rollouts.heard_of(env_id)
    own = state.environments[env_id].request
    live = rollouts.live()
    if report is not None and env_id not in live:
        raise NotFoundError(f"Environment {env_id} has said goodbye.", hint="POST /register-env again.")
    queued: dict[int | None, int] = {}
    largest = 1
    for group in state.queued():
        queued[group.env_id] = queued.get(group.env_id, 0) + group.size
        largest = max(largest, group.size)
    mine = queued.pop(env_id, 0)
    others = sum(max(0, count - _reserved(rollouts, other)) for other, count in queued.items())
    return StatusEnvReply(
        current_step=state.step,
        queue_size=max((mine + others) // own.group_size, _pressure(rollouts, own.group_size)),
        unallocated_fraction=1.0
        - min(1.0, sum(max(0.0, request.min_batch_allocation or 0.0) for request in live.values())),
        self_queue_size=mine // own.group_size,
        max_group_size=largest,
        env_weight=_weight(own, list(live.values())),
        batches_out=rollouts.batches_out,
        room=None if report is None else _room(rollouts, report, live, _weight(own, list(live.values()))),
    )


def _room(rollouts: Rollouts, report: EnvReport, live: dict[int, RegisterEnv], weight: float) -> int:
    """Groups that the environment may begin now, and can."""
    state, registration = rollouts.state, rollouts.state.registration
    if registration is None or rollouts.crowded or rollouts.awaits_reports():
        return 0
    batch_size, size = registration.batch_size, live[report.env_id].group_size
    sizes = {env_id: request.group_size for env_id, request in live.items()}
    have = _sequences_by_owner(rollouts, sizes)
    stored = sum(group.size for group in state.stored())
    free = rollouts.pace.room(live, stored, out=rollouts.batches_out, batch_size=batch_size)
    left = (report.last_step - state.step - rollouts.batches_out) * batch_size - sum(have.values())
    shares = rollouts.minimums(batch_size)
    kept = sum(max(0, least - have.get(env_id, 0)) for env_id, least in shares.items() if env_id != report.env_id)
    groups = min(free - kept, left) // size
    if groups > 0:
        return min(report.wants, math.ceil(groups * weight) if len(live) > 1 else groups)
    # Groups of odd sizes may be enough and yet not add up to a batch; one more is made until some do.
    unfinished = report.last_step > state.step + rollouts.batches_out
    stuck = unfinished and not rollouts.batches_out and not rollouts.pace.under_way(sizes) and not rollouts.ready
    return min(report.wants, int(stuck))


def _sequences_by_owner(rollouts: Rollouts, sizes: dict[int, int]) -> dict[int | None, int]:
    """Stored and under way."""
    have: dict[int | None, int] = {}
    for group in rollouts.state.stored():
        have[group.env_id] = have.get(group.env_id, 0) + group.size
    for env_id, size in sizes.items():
        have[env_id] = have.get(env_id, 0) + sum(one.sequences for one in rollouts.pace.under_way({env_id: size}))
    return have


def _weight(own: RegisterEnv, live: list[RegisterEnv]) -> float:
    total = sum(_claim(request) for request in live)
    share = _claim(own) / total if total > 0 else 0.0
    return min(1.0, max(MIN_WEIGHT, share))


def _claim(request: RegisterEnv) -> float:
    length = min(max(request.max_token_length, 0), LARGEST_FACTOR)
    return length * min(max(request.weight, 0.0), LARGEST_FACTOR)


def _reserved(rollouts: Rollouts, env_id: int | None) -> int:
    """Sequences of another environment that its own minimum share will take, and so do not compete."""
    if env_id is None or env_id >= len(rollouts.state.environments):
        return 0
    share = rollouts.state.environments[env_id].request.min_batch_allocation
    return int((rollouts.state.batch_size or 0) * share) if share else 0


def _pressure(rollouts: Rollouts, group_size: int) -> int:
    """A queue size that makes environments pause, once half of what can be stored is in use.

    Not larger than the rest of the training: an environment that reads more groups than it will ever need, ends.
    """
    state = rollouts.state
    if not rollouts.crowded:
        return 0
    if state.registration is None:
        return state.live_groups
    steps_left = max(0, state.registration.num_steps - state.step)
    return steps_left * state.registration.batch_size // group_size

"""``rollouts.jsonl``: a few scored rollouts of every step, as text, for people.

Invariant: what is written is what was trained on: decoded from the ids of the batch, nothing re-generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hermes_rl_mcp.contracts.records import RolloutLine
from trainer.backends.base import Backend
from trainer.batching import Rollout


def rollout_lines(step: int, rollouts: Sequence[Rollout], backend: Backend, count: int) -> list[dict[str, object]]:
    """``count`` rollouts spread evenly over the batch."""
    if not rollouts or count == 0:
        return []
    stride = max(1, math.ceil(len(rollouts) / count))
    return [_line(step, rollout, backend).model_dump() for rollout in rollouts[::stride]]


def _line(step: int, rollout: Rollout, backend: Backend) -> RolloutLine:
    datum = rollout.datum
    split = rollout.prompt_length
    advantages_M = datum.advantages_T[datum.trainable_T]
    return RolloutLine(
        step=step,
        group=datum.group,
        policy_version=rollout.policy_version,
        prompt=backend.decode(datum.tokens_T[:split].tolist()),
        completion=backend.decode(datum.tokens_T[split:].tolist()),
        reward=rollout.score,
        reward_parts=rollout.reward_parts,
        advantage=float(advantages_M.mean()) if advantages_M.size else 0.0,
        tokens=rollout.length,
        finish_reason=rollout.finish_reason,
    )

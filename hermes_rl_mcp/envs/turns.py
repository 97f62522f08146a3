"""Credit over the turns of a conversation: an advantage for each token. Pure functions of lists."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hermes_rl_mcp.contracts.rollout_api import MASKED


def turn_of_token(masks_T: Sequence[int]) -> list[int]:
    """[T] which turn of the policy a token belongs to, counted from 0; -1 where it did not write. Between two turns
    there is always something that it only read: the chat template's own tokens at least."""
    turns_T: list[int] = []
    turn, wrote = -1, False
    for mask in masks_T:
        writes = mask != MASKED
        turn += writes and not wrote
        turns_T.append(turn if writes else -1)
        wrote = writes
    return turns_T


def discounted_advantages(
    scores_G: Sequence[float], masks_GT: Sequence[Sequence[int]], discount: float
) -> list[list[float]]:
    """[G][T] score minus the group's mean, times ``discount`` to the power of the turns that came after the token's own
    (the return of a reward given at the end, Sutton and Barto, Reinforcement Learning, 2018, 3.3); 0 where the policy
    did not write."""
    mean = fmean(scores_G)
    advantages_GT = []
    for score, masks_T in zip(scores_G, masks_GT, strict=True):
        turns_T = turn_of_token(masks_T)
        last = max(turns_T, default=-1)
        advantages_GT.append([0.0 if t < 0 else (score - mean) * discount ** (last - t) for t in turns_T])
    return advantages_GT

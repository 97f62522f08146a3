"""Groups as they come over the wire to sequences the backend can train on.

Invariant: the wire's sentinels (mask -100, logprob 1.0) end here; behind it a token is trainable by an explicit boolean
and carries a real logprob, or is marked as missing one. What is left out is counted, never silently lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import NO_CANDIDATE, ScoredData
from hermes_rl_mcp.contracts.sampling_api import FinishReason
from trainer.advantages import ZERO_VARIANCE, centred, is_zero_variance
from trainer.backends.base import Datum, Flags
from trainer.wire import MalformedGroupError, WireSequence, parse

OVERLONG = "longer than max_token_trainer_length"
"""A reason for being out of the loss."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored sequence, trained on or not."""

    datum: Datum
    score: float
    reward_parts: dict[str, float]
    policy_version: int | None
    finish_reason: FinishReason | None
    length: int
    """Tokens that the mask names for training, whatever became of them."""
    prompt_length: int
    """Tokens before the first of these; the whole sequence if there is none."""

    @property
    def correct(self) -> bool:
        return self.reward_parts.get("correct", self.score) > 0


@dataclass(slots=True)
class TrainingBatch:
    """One batch. ``data`` holds only what the loss is made of: no groups without signal, and of the others no sequence
    that was taken out of the loss."""

    rollouts: list[Rollout] = field(default_factory=list)
    data: list[Datum] = field(default_factory=list)
    groups: int = 0
    zero_variance_groups: int = 0
    malformed: list[str] = field(default_factory=list)
    """Why groups were left out, one sentence each."""
    missing_logprobs: int = 0
    """Trainable tokens without a usable sampler logprob."""
    overlong_sequences: int = 0
    """Beyond the trainer's longest sequence."""
    out_of_loss: Counter[str] = field(default_factory=Counter)
    """Sequences of well-formed groups that were taken out of the loss, by reason."""
    trained_tokens: int = 0
    """Tokens of ``data`` that carry a gradient: a token of advantage 0 does only where something beside the policy term
    acts on it."""

    @property
    def reasons(self) -> str:
        """``3 ended by length, 1 without a trainable token``."""
        return ", ".join(f"{count} {reason}" for reason, count in self.out_of_loss.most_common())

    @property
    def unusable(self) -> bool:
        """Well-formed sequences, but no token of any has a sampler logprob."""
        return bool(self.missing_logprobs) and not any(one.datum.trainable_T.any() for one in self.rollouts)


def build_batch(groups: Sequence[ScoredData], config: TrainerConfig, vocabulary_size: int) -> TrainingBatch:
    """``config`` says what becomes of missing logprobs, overlong sequences and completions that ended by length."""
    batch = TrainingBatch()
    for number, group in enumerate(groups):
        batch.groups += 1
        try:
            sequences = parse(
                group,
                vocabulary_size=vocabulary_size,
                reference=config.kl_coef > 0,
                distill=config.distill_coef > 0,
            )
        except MalformedGroupError as fault:
            batch.malformed.append(f"group {number}: {fault}")
            continue
        batch.zero_variance_groups += is_zero_variance(group.scores)
        params = group.generation_params or {}
        kept: list[Datum] = []
        for sequence, score, advantage in zip(sequences, group.scores, centred(group.scores), strict=True):
            datum = _datum(number, sequence, advantage, config, batch)
            batch.rollouts.append(_rollout(datum, sequence, score, params.get("policy_version")))
            if reason := _out_of_loss(datum, sequence, config):
                batch.out_of_loss[reason] += 1
            else:
                kept.append(datum)
        if any(_has_signal(datum) for datum in kept):
            batch.data += kept
            batch.trained_tokens += sum(_carrying(datum, config) for datum in kept)
    return batch


def _datum(number: int, sequence: WireSequence, advantage: float, config: TrainerConfig, batch: TrainingBatch) -> Datum:
    length = min(len(sequence.tokens_T), config.max_token_trainer_length)
    batch.overlong_sequences += len(sequence.tokens_T) > length
    wanted_T = sequence.wanted_T[:length]
    logprobs_T = np.full(length, np.nan, np.float32) if sequence.logprobs_T is None else sequence.logprobs_T[:length]
    usable_T = wanted_T & np.isfinite(logprobs_T) & (logprobs_T <= 0.0)
    missing_T = wanted_T & ~usable_T
    batch.missing_logprobs += int(missing_T.sum())
    trainable_T = wanted_T if config.missing_logprobs == "recompute" else usable_T
    advantages_T = advantage if sequence.advantages_T is None else sequence.advantages_T[:length]
    if sequence.notes.set_advantage_to_zero:
        advantages_T = 0.0
    reference_T, ids_TK, teacher_TK = sequence.reference_logprobs_T, None, None
    if sequence.distill_ids_TK is not None and sequence.distill_logprobs_TK is not None:
        ids_TK = np.where(trainable_T[:, None], sequence.distill_ids_TK[:length], NO_CANDIDATE)
        teacher_TK = np.where(trainable_T[:, None], sequence.distill_logprobs_TK[:length], 0.0)
    return Datum.of(
        number,
        sequence.tokens_T[:length],
        trainable_T,
        np.where(usable_T, logprobs_T, 0.0),
        np.where(trainable_T, advantages_T, 0.0),
        sequence.temperature,
        missing_T=missing_T & trainable_T,
        reference_logprobs_T=None if reference_T is None else np.where(trainable_T, reference_T[:length], 0.0),
        distill_ids_TK=ids_TK,
        distill_logprobs_TK=teacher_TK,
    )


def _rollout(datum: Datum, sequence: WireSequence, score: float, group_version: object) -> Rollout:
    notes, wanted_T = sequence.notes, sequence.wanted_T
    version = notes.policy_version
    if version is None and isinstance(group_version, int) and not isinstance(group_version, bool):
        version = group_version
    return Rollout(
        datum=datum,
        score=score,
        reward_parts=notes.reward_parts,
        policy_version=version,
        finish_reason=notes.finish_reason,
        length=int(wanted_T.sum()),
        prompt_length=min(len(datum.tokens_T), int(wanted_T.argmax()) if wanted_T.any() else len(wanted_T)),
    )


def _out_of_loss(datum: Datum, sequence: WireSequence, config: TrainerConfig) -> str:
    """Why a sequence is out of the loss, tokens and all; empty if it is not. Its score stays in its siblings' baseline.
    One whose advantage the environment set to zero is out, too, unless a teacher has something to say about it."""
    if config.overlong == "drop" and len(sequence.tokens_T) > config.max_token_trainer_length:
        return OVERLONG
    if config.mask_truncated_completions and sequence.notes.finish_reason == "length":
        return "ended by length"
    if not datum.trainable_T.any():
        return "without a trainable token"
    if sequence.notes.set_advantage_to_zero and not _taught(datum).any():
        return "set to advantage zero by the environment"
    return ""


def _has_signal(datum: Datum) -> bool:
    return bool((abs(datum.advantages_T) > ZERO_VARIANCE).any() or _taught(datum).any())


def _taught(datum: Datum) -> Flags:
    """Tokens that a teacher says something about."""
    if datum.distill_ids_TK is None:
        return np.zeros_like(datum.trainable_T)
    taught_T: Flags = (datum.distill_ids_TK != NO_CANDIDATE).any(axis=1)
    return taught_T


def _carrying(datum: Datum, config: TrainerConfig) -> int:
    if config.kl_coef > 0 or config.loss_fn == "dro":  # a pull towards the base or the sampler acts on every token
        return int(datum.trainable_T.sum())
    return int((datum.trainable_T & ((datum.advantages_T != 0.0) | _taught(datum))).sum())

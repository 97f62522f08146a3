"""Groups as they come over the wire to sequences the backend can train on.

Invariant: the wire's sentinels (mask -100, logprob 1.0) end here; behind it a token is trainable by an explicit boolean
and carries a real logprob. What is dropped is counted, never silently lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from hermes_rl_mcp.contracts.rollout_api import MASKED, ScoredData, SequenceNotes
from hermes_rl_mcp.contracts.sampling_api import FinishReason
from trainer.advantages import ZERO_VARIANCE, is_zero_variance, token_advantages
from trainer.backends.base import Datum


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored sequence, trained on or not."""

    datum: Datum
    score: float
    reward_parts: dict[str, float]
    policy_version: int | None
    finish_reason: FinishReason | None

    @property
    def trained_tokens(self) -> int:
        return int(self.datum.trainable_T.sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trainable one; the whole sequence if there is none."""
        trainable_T = self.datum.trainable_T
        return int(trainable_T.argmax()) if trainable_T.any() else len(trainable_T)

    @property
    def correct(self) -> bool:
        return self.reward_parts.get("correct", self.score) > 0


@dataclass(slots=True)
class TrainingBatch:
    """One batch. ``data`` holds only the sequences of groups with signal."""

    rollouts: list[Rollout] = field(default_factory=list)
    data: list[Datum] = field(default_factory=list)
    groups: int = 0
    zero_variance_groups: int = 0
    malformed: list[str] = field(default_factory=list)
    """Why groups were left out, one sentence each."""
    missing_logprobs: int = 0
    """Trainable tokens without a usable sampler logprob; not trained."""
    truncated_sequences: int = 0
    """Cut to the trainer's longest sequence."""


def build_batch(groups: Sequence[ScoredData], max_length: int) -> TrainingBatch:
    batch = TrainingBatch()
    for number, group in enumerate(groups):
        batch.groups += 1
        if problem := _problem(group):
            batch.malformed.append(f"group {number}: {problem}")
            continue
        batch.zero_variance_groups += is_zero_variance(group.scores)
        rollouts = _rollouts(number, group, max_length, batch)
        batch.rollouts += rollouts
        if any(_has_signal(rollout.datum) for rollout in rollouts):
            batch.data += [rollout.datum for rollout in rollouts if rollout.trained_tokens]
    return batch


def _problem(group: ScoredData) -> str | None:
    size = len(group.scores)
    if size == 0 or len(group.tokens) != size or len(group.masks) != size:
        return f"{len(group.tokens)} token lists, {len(group.masks)} masks and {size} scores"
    if not all(math.isfinite(score) for score in group.scores):
        return "a score is not a finite number"
    lengths = [len(tokens_T) for tokens_T in group.tokens]
    for name in ("masks", "inference_logprobs", "advantages"):
        lists = getattr(group, name)
        if lists and [len(one) for one in lists] != lengths:
            return f"{name} and tokens have different lengths"
    if group.advantages and not all(math.isfinite(value) for row in group.advantages for value in row):
        return "an advantage is not a finite number"
    if group.overrides and len(group.overrides) != size:
        return f"{len(group.overrides)} overrides for {size} sequences"
    return None


def _rollouts(number: int, group: ScoredData, max_length: int, batch: TrainingBatch) -> list[Rollout]:
    size = len(group.scores)
    notes_G = [_notes(entry) for entry in group.overrides] if group.overrides else [SequenceNotes()] * size
    lengths_G = [len(tokens_T) for tokens_T in group.tokens]
    zeroed_G = [notes.set_advantage_to_zero for notes in notes_G]
    advantages_GT = token_advantages(group.scores, group.advantages or None, zeroed_G, lengths_G)
    params = group.generation_params or {}
    rollouts = []
    for at, notes in enumerate(notes_G):
        logprobs_T = group.inference_logprobs[at] if group.inference_logprobs else None
        datum = _datum(
            number,
            group.tokens[at],
            group.masks[at],
            logprobs_T,
            advantages_GT[at],
            max_length,
            _temperature(notes, group),
            batch,
        )
        version = notes.policy_version
        if version is None:
            version = _integer(params.get("policy_version"))
        rollouts.append(Rollout(datum, group.scores[at], notes.reward_parts, version, notes.finish_reason))
    return rollouts


def _datum(
    number: int,
    tokens_T: list[int],
    masks_T: list[int],
    logprobs_T: list[float] | None,
    advantages_T: list[float],
    max_length: int,
    temperature: float,
    batch: TrainingBatch,
) -> Datum:
    if len(tokens_T) > max_length:
        batch.truncated_sequences += 1
    length = min(len(tokens_T), max_length)
    wanted_T = [at > 0 and masks_T[at] != MASKED for at in range(length)]
    if logprobs_T is None:
        usable_T = [False] * length
    else:
        usable_T = [math.isfinite(logprobs_T[at]) and logprobs_T[at] <= 0.0 for at in range(length)]
    trainable_T = [wanted and usable for wanted, usable in zip(wanted_T, usable_T, strict=True)]
    batch.missing_logprobs += sum(wanted_T) - sum(trainable_T)
    return Datum.of(
        group=number,
        tokens_T=tokens_T[:length],
        trainable_T=trainable_T,
        sampler_logprobs_T=[
            logprobs_T[at] if trained and logprobs_T is not None else 0.0 for at, trained in enumerate(trainable_T)
        ],
        advantages_T=[advantages_T[at] if trained else 0.0 for at, trained in enumerate(trainable_T)],
        temperature=temperature,
    )


def _has_signal(datum: Datum) -> bool:
    return bool((abs(datum.advantages_T) > ZERO_VARIANCE).any())


def _notes(entry: dict[str, object]) -> SequenceNotes:
    """An environment of another maker may use these keys for something else; then they say nothing."""
    try:
        return SequenceNotes.model_validate(entry)
    except ValidationError:
        return SequenceNotes(set_advantage_to_zero=bool(entry.get("set_advantage_to_zero")))


def _temperature(notes: SequenceNotes, group: ScoredData) -> float:
    """Sequence, then generation parameters, then group. Greedy rows report logprobs at temperature 1."""
    for value in (
        notes.temperature,
        (group.generation_params or {}).get("temperature"),
        (group.group_overrides or {}).get("temperature"),
    ):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value) if value > 0 else 1.0
    return 1.0


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

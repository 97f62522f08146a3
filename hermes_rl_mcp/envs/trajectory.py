"""Sampled sequences as they travel: completions, token-exact trajectories, and Atropos' scored group.

Invariant: a trajectory's tokens, masks and logprobs always have the same length T, and tokens that were sampled are
kept as sampled; nothing re-tokenises them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_LOGPROB, SequenceNotes
from hermes_rl_mcp.contracts.sampling_api import FinishReason

Message = dict[str, Any]
"""``role``, ``content`` and whatever else the chat template knows."""


class ScoredDataItem(TypedDict, total=False):
    """One scored sequence, Atropos' names."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    inference_logprobs: list[float] | None
    distill_token_ids: list[list[int]] | None
    """[T][K] a teacher's candidates for the token at each position, [] where it says nothing; see ``distillation``."""
    distill_logprobs: list[list[float]] | None
    """[T][K] their logprobs at temperature 1, nats."""
    messages: list[Message] | None
    overrides: dict[str, Any] | None


class ScoredDataGroup(TypedDict, total=False):
    """G scored sequences for one item, Atropos' names; absent and null mean the same."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    distill_token_ids: list[list[list[int]]] | None
    """[G][T][K]; [] for a sequence without a teacher."""
    distill_logprobs: list[list[list[float]]] | None
    messages: list[list[Message]] | None
    generation_params: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    images: Any
    env_id: int | None


@dataclass(frozen=True)
class Completion:
    """One answer of the sampler."""

    text: str
    """Decoded without special tokens."""
    token_ids: list[int]
    logprobs: list[float] | None
    """One per token id; None when the ids were made from text, which must never be trained on."""
    finish_reason: FinishReason | None
    policy_version: int | None = None
    """None for servers that do not say."""


@dataclass
class Trajectory:
    """A conversation as the model saw it: context and completions in order, aligned token by token."""

    messages: list[Message]
    text: str = ""
    """Everything so far with special tokens, as the model saw it."""
    tokens_T: list[int] = field(default_factory=list)
    masks_T: list[int] = field(default_factory=list)
    logprobs_T: list[float] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where in ``tokens_T`` each completion begins."""
    temperature: float | None = None

    def add_context(self, text: str, token_ids: Sequence[int]) -> None:
        """Tokens that the model reads and did not write."""
        self.text += text
        self.tokens_T.extend(token_ids)
        self.masks_T.extend([MASKED] * len(token_ids))
        self.logprobs_T.extend([NO_LOGPROB] * len(token_ids))

    def add_completion(self, completion: Completion, text: str) -> None:
        """``text`` is the completion with special tokens; the assistant message is added as well."""
        self.text += text
        self.starts.append(len(self.tokens_T))
        self.tokens_T.extend(completion.token_ids)
        self.masks_T.extend(completion.token_ids)
        unknown = [NO_LOGPROB] * len(completion.token_ids)
        self.logprobs_T.extend(unknown if completion.logprobs is None else completion.logprobs)
        self.completions.append(completion)
        self.messages.append({"role": "assistant", "content": completion.text})

    @property
    def exact(self) -> bool:
        """Whether every completion came with the sampler's own ids and logprobs."""
        return all(completion.logprobs is not None for completion in self.completions)

    @property
    def last(self) -> Completion:
        return self.completions[-1]

    @property
    def notes(self) -> SequenceNotes:
        """Policy version of the first sampled token, finish reason of the last completion."""
        return SequenceNotes(
            policy_version=self.completions[0].policy_version if self.completions else None,
            finish_reason=self.completions[-1].finish_reason if self.completions else None,
            temperature=self.temperature,
        )

    def item(self, score: float, reward_parts: dict[str, float] | None = None, **overrides: Any) -> ScoredDataItem:
        """The scored sequence. ``overrides`` (``set_advantage_to_zero=True``, ...) go to the trainer."""
        notes = self.notes.model_copy(update={"reward_parts": dict(reward_parts or {}), **overrides})
        return ScoredDataItem(
            tokens=list(self.tokens_T),
            masks=list(self.masks_T),
            scores=float(score),
            inference_logprobs=list(self.logprobs_T) if self.exact else None,
            messages=list(self.messages),
            overrides=notes.model_dump(mode="json"),
        )


def group_of(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """One group out of scored sequences. An optional column is there only if every sequence has it; a teacher's
    candidates, if one sequence has them."""
    group = ScoredDataGroup(
        tokens=[item["tokens"] for item in items],
        masks=[item["masks"] for item in items],
        scores=[float(item["scores"]) for item in items],
    )
    columns: dict[str, Any] = {}
    for name in ("advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides"):
        column = [item.get(name) for item in items]
        if items and all(value is not None for value in column):
            columns[name] = column
    if any(item.get("distill_token_ids") for item in items):
        for name in ("distill_token_ids", "distill_logprobs"):
            columns[name] = [item.get(name) or [] for item in items]
    group.update(cast(ScoredDataGroup, columns))
    notes = [SequenceNotes.model_validate(item.get("overrides") or {}) for item in items]
    versions = [note.policy_version for note in notes if note.policy_version is not None]
    temperatures = [note.temperature for note in notes if note.temperature is not None]
    group["generation_params"] = {
        "temperature": temperatures[0] if temperatures else None,
        "policy_version": min(versions) if versions else None,
    }
    return group

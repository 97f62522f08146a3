"""Lay sequences out for a training pass: the prompt of a group once, its completions behind it, in padded batches.

Invariants: every trainable token has one source, the position whose hidden state predicts it, and that state is the one
a row of its own would have given (same mask, same position number). The only shift by one of the whole trainer is here.
A sequence lies in one row with all its trained tokens, and a row in one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.backends.base import Datum, Flags, Floats, Ids

PROMPT = -1
PADDING = -2


@dataclass(slots=True)
class TrainRow:
    """Inputs of length R, and for each of its M trained tokens where it is predicted."""

    tokens_R: list[int] = field(default_factory=list)
    positions_R: list[int] = field(default_factory=list)
    branches_R: list[int] = field(default_factory=list)
    """PROMPT, else the number of the completion; a completion sees the prompt and itself."""
    sources_M: list[int] = field(default_factory=list)
    members: list[tuple[int, Datum]] = field(default_factory=list)
    """The sequences, each with its number in the data; their trained tokens are the row's, in this order."""

    def __len__(self) -> int:
        return len(self.tokens_R)

    def add(self, number: int, datum: Datum, prompt: int) -> None:
        """Append what follows the first ``prompt`` tokens, up to the last input that a trained token needs."""
        start = len(self)
        end = _inputs(datum)
        self.tokens_R += datum.tokens_T[prompt:end].tolist()
        self.positions_R += range(prompt, end)
        self.branches_R += [len(self.members)] * (end - prompt)
        self.members.append((number, datum))
        at_M = np.flatnonzero(datum.trainable_T)
        self.sources_M += [prompt - 1 if at == prompt else start + at - 1 - prompt for at in at_M.tolist()]


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The M trained tokens of some rows, in the rows' order."""

    targets_M: Ids
    sequences_M: Ids
    """Number of the token's sequence in the data."""
    sampler_logprobs_M: Floats
    missing_M: Flags
    advantages_M: Floats
    temperatures_M: Floats
    reference_logprobs_M: Floats
    """NaN where none came with the sequence."""
    distill_ids_MK: Ids
    """-1 where there is no candidate; K is the most that a sequence of these rows brings, or 0."""
    distill_logprobs_MK: Floats

    @classmethod
    def of(cls, rows: Sequence[TrainRow]) -> TokenArrays:
        """``rows`` is not empty."""
        members = [member for row in rows for member in row.members]
        width = max(0 if datum.distill_ids_TK is None else datum.distill_ids_TK.shape[1] for _, datum in members)
        picks = [(number, datum, np.flatnonzero(datum.trainable_T)) for number, datum in members]
        return cls(
            np.concatenate([datum.tokens_T[at_M] for _, datum, at_M in picks]),
            np.concatenate([np.full(len(at_M), number, np.int64) for number, _, at_M in picks]),
            np.concatenate([datum.sampler_logprobs_T[at_M] for _, datum, at_M in picks]),
            np.concatenate([datum.missing_T[at_M] for _, datum, at_M in picks]),
            np.concatenate([datum.advantages_T[at_M] for _, datum, at_M in picks]),
            np.concatenate([np.full(len(at_M), datum.temperature, np.float32) for _, datum, at_M in picks]),
            np.concatenate([_reference(datum, at_M) for _, datum, at_M in picks]),
            np.concatenate([_candidates(datum.distill_ids_TK, at_M, width, -1, np.int64) for _, datum, at_M in picks]),
            np.concatenate(
                [_candidates(datum.distill_logprobs_TK, at_M, width, 0, np.float32) for _, datum, at_M in picks]
            ),
        )


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What decides whether a completion joins a row that holds its prompt already."""

    hidden: int
    max_tokens: int
    """Of a row."""
    block: float = math.inf
    """Of one more block of attention, in pairs of query and key; infinite where attention is always dense."""


def build_rows(data: Sequence[Datum], *, share_prompts: bool, costs: RowCosts) -> list[TrainRow]:
    """Rows of all data. Sequences without a trainable token give none."""
    groups: dict[int, list[tuple[int, Datum]]] = {}
    for number, datum in enumerate(data):
        if datum.trainable_T.any():
            groups.setdefault(datum.group, []).append((number, datum))
    if not share_prompts:
        return [row for group in groups.values() for member in group for row in _pack([member], costs)]
    return [row for group in groups.values() for row in _pack(group, costs)]


def micro_batches(rows: Iterable[TrainRow], max_tokens: int) -> list[list[TrainRow]]:
    """Rows of similar length together, ``max_tokens`` padded tokens each; a longer row goes alone."""
    batches: list[list[TrainRow]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0]) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _inputs(datum: Datum) -> int:
    """Number of tokens that are inputs: all before the last trainable one, which is only a target."""
    return int(np.flatnonzero(datum.trainable_T)[-1])


def _reference(datum: Datum, at_M: Ids) -> Floats:
    if datum.reference_logprobs_T is None:
        return np.full(len(at_M), np.nan, np.float32)
    return datum.reference_logprobs_T[at_M]


def _candidates(values_TK: NDArray[Any] | None, at_M: Ids, width: int, filling: int, kind: type) -> NDArray[Any]:
    """[M, width]"""
    full_MK: NDArray[Any] = np.full((len(at_M), width), filling, kind)
    if values_TK is not None:
        full_MK[:, : values_TK.shape[1]] = values_TK[at_M]
    return full_MK


def _pack(group: Sequence[tuple[int, Datum]], costs: RowCosts) -> list[TrainRow]:
    prompt = _common_prompt([datum for _, datum in group])
    rows: list[TrainRow] = []
    for number, datum in group:
        extra = _inputs(datum) - prompt
        if not rows or not _worth(len(rows[-1]), prompt, extra, costs):
            row = TrainRow(datum.tokens_T[:prompt].tolist(), list(range(prompt)), [PROMPT] * prompt)
            rows.append(row)
        rows[-1].add(number, datum, prompt)
    return rows


def _common_prompt(group: Sequence[Datum]) -> int:
    """Longest common prefix, but not beyond the first trainable token of any: each needs its own target."""
    prompt = min(int(datum.trainable_T.argmax()) for datum in group)
    first = group[0].tokens_T
    for datum in group[1:]:
        differ = datum.tokens_T[:prompt] != first[:prompt]
        if differ.any():
            prompt = int(differ.argmax())
    return prompt


def _worth(row: int, prompt: int, extra: int, costs: RowCosts) -> bool:
    """Whether a completion is cheaper in this row than in one of its own.

    Linear layers save the prompt: per layer about 24·hidden² per token against 4·hidden per pair of tokens. Attention
    takes the row's new length squared, or a block of its own where that is cheaper.
    """
    dense = (row + extra) ** 2 - row**2
    in_blocks = extra * (prompt + extra) + costs.block
    shared = 6 * costs.hidden * extra + min(dense, in_blocks)
    alone = 6 * costs.hidden * (prompt + extra) + (prompt + extra) ** 2
    return prompt > 0 and row + extra <= costs.max_tokens and shared <= alone

"""Lay sequences out for a training pass: the prompt of a group once, its completions behind it, in padded batches.

Invariant: every trainable token has one source, the position whose hidden state predicts it, and that state is the one
a row of its own would have given (same mask, same position number). The only shift by one of the whole trainer is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.backends.base import Datum

PROMPT = -1
PADDING = -2


@dataclass(slots=True)
class TrainRow:
    """Inputs of length R, and for each of its M trained tokens where it is predicted and what it is."""

    tokens_R: list[int] = field(default_factory=list)
    positions_R: list[int] = field(default_factory=list)
    branches_R: list[int] = field(default_factory=list)
    """PROMPT, else the number of the completion; a completion sees the prompt and itself."""
    sources_M: list[int] = field(default_factory=list)
    targets_M: list[int] = field(default_factory=list)
    sampler_logprobs_M: list[float] = field(default_factory=list)
    advantages_M: list[float] = field(default_factory=list)
    temperatures_M: list[float] = field(default_factory=list)
    branch_count: int = 0

    def __len__(self) -> int:
        return len(self.tokens_R)

    def add(self, datum: Datum, prompt: int) -> None:
        """Append what follows the first ``prompt`` tokens, up to the last input that a trained token needs."""
        start = len(self)
        end = _inputs(datum)
        self.tokens_R += datum.tokens_T[prompt:end].tolist()
        self.positions_R += range(prompt, end)
        self.branches_R += [self.branch_count] * (end - prompt)
        self.branch_count += 1
        at_M = np.flatnonzero(datum.trainable_T)
        self.sources_M += [prompt - 1 if at == prompt else start + at - 1 - prompt for at in at_M.tolist()]
        self.targets_M += datum.tokens_T[at_M].tolist()
        self.sampler_logprobs_M += datum.sampler_logprobs_T[at_M].tolist()
        self.advantages_M += datum.advantages_T[at_M].tolist()
        self.temperatures_M += [datum.temperature] * len(at_M)


def build_rows(data: Sequence[Datum], *, share_prompts: bool, hidden: int, max_tokens: int) -> list[TrainRow]:
    """Rows of all data. Sequences without a trainable token give none."""
    groups: dict[int, list[Datum]] = {}
    for datum in data:
        if datum.trainable_T.any():
            groups.setdefault(datum.group, []).append(datum)
    if not share_prompts:
        return [row for group in groups.values() for datum in group for row in _pack([datum], hidden, max_tokens)]
    return [row for group in groups.values() for row in _pack(group, hidden, max_tokens)]


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


def _pack(group: Sequence[Datum], hidden: int, max_tokens: int) -> list[TrainRow]:
    prompt = _common_prompt(group)
    rows: list[TrainRow] = []
    for datum in group:
        extra = _inputs(datum) - prompt
        if not rows or not _worth(len(rows[-1]), prompt, extra, hidden, max_tokens):
            row = TrainRow(datum.tokens_T[:prompt].tolist(), list(range(prompt)), [PROMPT] * prompt)
            rows.append(row)
        rows[-1].add(datum, prompt)
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


def _worth(row: int, prompt: int, extra: int, hidden: int, max_tokens: int) -> bool:
    """Whether a completion is cheaper in this row than in one of its own. A shared row's attention is dense (row²),
    its linear layers save the prompt: per layer about 24·hidden² per token against 4·hidden per pair of tokens."""

    def cost(length: int) -> int:
        return 6 * hidden * length + length * length

    return prompt > 0 and row + extra <= max_tokens and cost(row + extra) <= cost(row) + cost(prompt + extra)

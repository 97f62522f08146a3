"""A group as it came over the wire, checked and as arrays.

Invariant: what ``parse`` returns fits together, is finite and names only tokens of the vocabulary; anything else raises
with the place of the fault. A sampler logprob that is missing is no fault: it stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_CANDIDATE, TRAINED_FLAG, ScoredData, SequenceNotes
from trainer.backends.base import Flags, Floats, Ids

_MOST_PROBABILITY = 1.01
"""Rounding of 16-bit logprobs; more is a token named twice, or no logprobs at all."""


class MalformedGroupError(ValueError):
    """The group cannot be trained on. The text says where it is wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class WireSequence:
    """One sequence; its arrays are aligned with ``tokens_T``."""

    tokens_T: Ids
    wanted_T: Flags
    """To be trained: the mask is not -100, and it is not the first token, which nothing predicts."""
    logprobs_T: Floats | None
    """As sent: 1.0, or anything above 0 or not finite, where there is none."""
    advantages_T: Floats | None
    reference_logprobs_T: Floats | None
    distill_ids_TK: Ids | None
    distill_logprobs_TK: Floats | None
    notes: SequenceNotes
    temperature: float


def parse(
    group: ScoredData, *, vocabulary_size: int, reference: bool = False, distill: bool = False
) -> list[WireSequence]:
    """The G sequences of a group. ``ref_logprobs`` and the distillation fields are looked at only if they are wanted.

    Raises MalformedGroupError.
    """
    size = len(group.scores)
    if size == 0 or len(group.tokens) != size or len(group.masks) != size:
        raise MalformedGroupError(f"{len(group.tokens)} token lists, {len(group.masks)} masks and {size} scores")
    if not all(math.isfinite(score) for score in group.scores):
        raise MalformedGroupError("a score is not a finite number")
    wanted = ["inference_logprobs", "advantages", "overrides"] + ["ref_logprobs"] * reference
    wanted += ["distill_token_ids", "distill_logprobs"] * distill
    for name in wanted:
        if (lists := getattr(group, name)) and len(lists) != size:
            raise MalformedGroupError(f"{len(lists)} {name} for {size} sequences")
    if distill and bool(group.distill_token_ids) != bool(group.distill_logprobs):
        raise MalformedGroupError("of distill_token_ids and distill_logprobs one is missing")
    return [_sequence(group, at, vocabulary_size, reference, distill) for at in range(size)]


def _sequence(group: ScoredData, at: int, vocabulary_size: int, reference: bool, distill: bool) -> WireSequence:
    tokens_T = _integers(group.tokens[at], f"tokens[{at}]")
    length = len(tokens_T)
    if length == 0:
        raise MalformedGroupError(f"tokens[{at}] is empty")
    _check(f"tokens[{at}]", tokens_T, (tokens_T < 0) | (tokens_T >= vocabulary_size), _not_in(vocabulary_size))
    masks_T = _integers(group.masks[at], f"masks[{at}]", length)
    wanted_T = masks_T != MASKED
    _check(
        f"masks[{at}]",
        masks_T,
        wanted_T & (masks_T != tokens_T) & (masks_T != TRAINED_FLAG),
        f"; it must be {MASKED} or the token there",
    )
    wanted_T[0] = False
    logprobs_T = _floats(group.inference_logprobs, at, "inference_logprobs", length)
    advantages_T = _floats(group.advantages, at, "advantages", length)
    if advantages_T is not None:
        _check(f"advantages[{at}]", advantages_T, ~np.isfinite(advantages_T), ", not a finite number")
    reference_T = _floats(group.ref_logprobs, at, "ref_logprobs", length) if reference else None
    if reference_T is not None:
        unusable_T = ~(np.isfinite(reference_T) & (reference_T <= 0.0))
        _check(f"ref_logprobs[{at}]", reference_T, wanted_T & unusable_T, ", not a logprob, on a trained token")
    ids_TK, candidates_TK = _candidates(group, at, wanted_T, vocabulary_size) if distill else (None, None)
    notes = _notes(group.overrides[at]) if group.overrides else SequenceNotes()
    return WireSequence(
        tokens_T,
        wanted_T,
        logprobs_T,
        advantages_T,
        reference_T,
        ids_TK,
        candidates_TK,
        notes,
        _temperature(notes, group),
    )


def _integers(values: Sequence[int], place: str, length: int | None = None) -> Ids:
    if length is not None and len(values) != length:
        raise MalformedGroupError(f"{place} has {len(values)} entries for {length} tokens")
    try:
        return np.asarray(values, np.int64)
    except OverflowError:
        raise MalformedGroupError(f"{place} has a number beyond 64 bits") from None


def _floats(rows: Sequence[Sequence[float]] | None, at: int, name: str, length: int) -> Floats | None:
    """None where the field is absent, which an empty list means, too. What float32 cannot hold becomes infinite."""
    if not rows:
        return None
    if len(rows[at]) != length:
        raise MalformedGroupError(f"{name}[{at}] has {len(rows[at])} entries for {length} tokens")
    with np.errstate(over="ignore"):
        return np.asarray(rows[at], np.float64).astype(np.float32)


def _check(place: str, values_T: NDArray[np.generic], faulty_T: Flags, why: str) -> None:
    if faulty_T.any():
        first = int(faulty_T.argmax())
        raise MalformedGroupError(f"{place}[{first}] is {values_T[first]}{why}")


def _not_in(vocabulary_size: int) -> str:
    return f"; the model's vocabulary has the ids 0 to {vocabulary_size - 1}"


def _candidates(group: ScoredData, at: int, wanted_T: Flags, vocabulary_size: int) -> tuple[Ids | None, Floats | None]:
    """Of trained positions alone: elsewhere teachers send placeholders. Numbers of candidates may differ, and those
    with the id -1 are none."""
    if not group.distill_token_ids or not group.distill_logprobs:
        return None, None
    ids, logprobs = group.distill_token_ids[at], group.distill_logprobs[at]
    if not ids and not logprobs:
        return None, None
    if len(ids) != len(wanted_T) or len(logprobs) != len(wanted_T):
        raise MalformedGroupError(
            f"distill_token_ids[{at}] and distill_logprobs[{at}] have {len(ids)} and {len(logprobs)} entries for "
            f"{len(wanted_T)} tokens"
        )
    places = np.flatnonzero(wanted_T).tolist()
    width = max((len(ids[place]) for place in places), default=0)
    if width == 0:
        return None, None
    ids_TK = np.full((len(ids), width), NO_CANDIDATE, np.int64)
    logprobs_TK = np.zeros((len(ids), width), np.float32)
    for place in places:
        where = f"distill_token_ids[{at}][{place}]"
        ids_K = _integers(ids[place], where)
        logprobs_K = _floats([logprobs[place]], 0, f"distill_logprobs[{at}][{place}]", len(ids_K))
        assert logprobs_K is not None
        if _is_placeholder(logprobs_K):
            continue
        present_K = ids_K != NO_CANDIDATE
        outside_K = (ids_K < 0) | (ids_K >= vocabulary_size)
        _check(where, ids_K, present_K & outside_K, _not_in(vocabulary_size))
        unusable_K = ~(np.isfinite(logprobs_K) & (logprobs_K <= 0.0))
        _check(f"distill_logprobs[{at}][{place}]", logprobs_K, present_K & unusable_K, ", not a logprob")
        ids_K, logprobs_K = ids_K[present_K], logprobs_K[present_K]
        if (total := float(np.exp(logprobs_K).sum())) > _MOST_PROBABILITY:
            raise MalformedGroupError(
                f"distill_logprobs[{at}][{place}] are of probabilities that add up to {total:.3g}"
            )
        ids_TK[place, : len(ids_K)] = ids_K
        logprobs_TK[place, : len(ids_K)] = logprobs_K
    return ids_TK, logprobs_TK


def _is_placeholder(logprobs_K: Floats) -> bool:
    """Several candidates of probability 1 each: how environments made for another trainer say "no teacher here"."""
    return len(logprobs_K) > 1 and not logprobs_K.any()


def _notes(entry: Mapping[str, object]) -> SequenceNotes:
    """An environment of another maker may use a key for something else; then that key says nothing."""
    known = {**entry, "set_advantage_to_zero": bool(entry.get("set_advantage_to_zero"))}
    try:
        return SequenceNotes.model_validate(known)
    except ValidationError as error:
        foreign = {fault["loc"][0] for fault in error.errors(include_url=False)}
        return SequenceNotes.model_validate({name: value for name, value in known.items() if name not in foreign})


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

"""What may be sent as a group, and the count of what was not.

Invariant: every group an environment makes ends in exactly one of these counts: sent, dropped with a reason, failed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.rollout_api import MASKED, NO_CANDIDATE, NO_LOGPROB, ScoredData, SequenceNotes
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.saying import said
from hermes_rl_mcp.envs.timings import percentile
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.files import now

log = logging.getLogger(__name__)

CONSECUTIVE_LIMIT = 20
"""Unusable groups in a row after which the environment gives up: by then it is no accident."""
NO_SCORE = "no_score"
"""Reason of a group whose scores are missing or not finite."""
REJECTED = "rejected"
"""Reason of a group that the environment itself threw away, as Atropos' do where there is nothing to learn."""
FAILED = "failed"
"""Reason of a group that ended in an exception."""
EQUAL_SCORES_LIMIT = 500
"""Groups in a row without any difference in score, when those are dropped here: the task has no signal."""


class BadGroupError(Exception):
    """A group that must not be sent. ``reason`` is a short name to count by."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class MissingScoreError(Exception):
    """The environment gave something that is no finite number where a score belongs."""


class GivingUpError(HermesRLError):
    """The environment cannot make usable groups."""


def checked(
    group: Mapping[str, Any], *, group_size: int, max_token_len: int = -1, refuse_equal_scores: bool = False
) -> ScoredData:
    """The group as it goes over the wire. Raises BadGroupError. ``max_token_len`` <= 0 = no limit."""
    try:
        # Environments written for Atropos give [] and {} for what is absent.
        data = ScoredData.model_validate({k: v for k, v in group.items() if v not in ([], {}) or k in _REQUIRED})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = NO_SCORE if first["loc"][:1] == ("scores",) else "invalid"
        raise BadGroupError(reason, f"{where}: {first['msg']}, found {_short(first['input'])}") from error
    _check_size(data, group_size)
    for index, (tokens_T, masks_T) in enumerate(zip(data.tokens, data.masks, strict=True)):
        _check_sequence(data, index, tokens_T, masks_T)
        _check_teacher(data, index, len(tokens_T))
        if 0 < max_token_len <= len(tokens_T):
            raise BadGroupError(
                "too_long",
                f"sequence {index} has {len(tokens_T)} tokens, the trainer takes fewer than "
                f"{max_token_len}; lower max_token_length or raise max_token_trainer_length",
            )
    if not all(math.isfinite(score) for score in data.scores):
        raise BadGroupError(NO_SCORE, f"scores are not finite: {data.scores}")
    for index, note in enumerate(data.overrides or []):
        _check_notes(index, note)
    if refuse_equal_scores and len(data.scores) > 1 and len(set(data.scores)) == 1:
        raise BadGroupError("equal_scores", f"every score is {data.scores[0]}")
    return data


_REQUIRED = ("tokens", "masks", "scores")
_TEACHER = ("distill_token_ids", "distill_logprobs")
_PER_SEQUENCE = (
    *("masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides"),
    *_TEACHER,
)


def _check_size(data: ScoredData, group_size: int) -> None:
    expected = (data.group_overrides or {}).get("group_size", group_size)
    if not isinstance(expected, int):
        raise BadGroupError("invalid", f"group_overrides: group_size is {_short(expected)}")
    if len(data.tokens) != expected:
        raise BadGroupError("wrong_size", f"{len(data.tokens)} sequences where group_size is {expected}")
    for name in _PER_SEQUENCE:
        column: Sequence[Any] | None = getattr(data, name)
        if column is not None and len(column) != expected:
            raise BadGroupError("invalid", f"{len(column)} {name} for {expected} sequences")
    if (data.distill_token_ids is None) != (data.distill_logprobs is None):
        raise BadGroupError("invalid", "of distill_token_ids and distill_logprobs one is missing")


def _check_notes(index: int, note: Mapping[str, Any]) -> None:
    """What is said of one sequence; other keys than ours are the environment's own."""
    try:
        parts = SequenceNotes.model_validate(note).reward_parts
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"overrides of sequence {index}: {where}: {first['msg']}, found {_short(first['input'])}"
        raise BadGroupError("invalid", text) from error
    if wrong := [name for name, value in parts.items() if not math.isfinite(value)]:
        raise BadGroupError("invalid", f"overrides of sequence {index}: reward part {wrong[0]} is {parts[wrong[0]]}")


def _check_sequence(data: ScoredData, index: int, tokens_T: list[int], masks_T: list[int]) -> None:
    for name in ("masks", "advantages", "ref_logprobs", "inference_logprobs"):
        column = getattr(data, name)
        if column is None:
            continue
        values = column[index]
        if len(values) != len(tokens_T):
            raise BadGroupError("invalid", f"sequence {index}: {len(values)} {name} for {len(tokens_T)} tokens")
        if not all(math.isfinite(value) for value in values):
            raise BadGroupError("invalid", f"sequence {index}: {name} are not finite")
    for token, mask in zip(tokens_T, masks_T, strict=True):
        if mask not in (MASKED, token):
            raise BadGroupError("invalid", f"sequence {index}: a mask is neither {MASKED} nor its token")
    if data.inference_logprobs is not None:
        for logprob, mask in zip(data.inference_logprobs[index], masks_T, strict=True):
            if mask != MASKED and logprob > 0 and logprob != NO_LOGPROB:
                raise BadGroupError("invalid", f"sequence {index}: a logprob is above 0: {logprob}")


def _check_teacher(data: ScoredData, index: int, length: int) -> None:
    """A row of candidates for each token, or none at all; as many logprobs as ids, and no logprob that is none."""
    if data.distill_token_ids is None or data.distill_logprobs is None:
        return
    ids_TK, logprobs_TK = data.distill_token_ids[index], data.distill_logprobs[index]
    for name, count in zip(_TEACHER, (len(ids_TK), len(logprobs_TK)), strict=True):
        if count not in (0, length) or count != len(ids_TK):
            raise BadGroupError("invalid", f"sequence {index}: {count} {name} for {length} tokens")
    for position, (ids_K, logprobs_K) in enumerate(zip(ids_TK, logprobs_TK, strict=True)):
        where = f"sequence {index}, position {position}"
        if len(ids_K) != len(logprobs_K):
            raise BadGroupError("invalid", f"{where}: {len(logprobs_K)} distill_logprobs for {len(ids_K)} candidates")
        for token, logprob in zip(ids_K, logprobs_K, strict=True):
            if token < NO_CANDIDATE:
                raise BadGroupError("invalid", f"{where}: {token} in distill_token_ids is no token")
            if token != NO_CANDIDATE and not (math.isfinite(logprob) and logprob <= 0):
                raise BadGroupError("invalid", f"{where}: {logprob} in distill_logprobs is no logprob")


@dataclass
class Tally:
    """Counts since the start, and how many unusable groups came in a row."""

    sent: int = 0
    failed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unusable_in_a_row: int = 0
    equal_in_a_row: int = 0
    first_error: str = ""
    """Of the current row of unusable groups."""
    first_reason: str = ""
    """Its kind."""

    def count_sent(self) -> None:
        self.sent += 1
        self.unusable_in_a_row = self.equal_in_a_row = 0
        self.first_error = self.first_reason = ""

    def count_dropped(self, error: BadGroupError) -> None:
        self.dropped[error.reason] += 1
        if error.reason in ("equal_scores", REJECTED):
            self.equal_in_a_row += 1
            log.info("group dropped: %s", error)
            return
        log.warning("group dropped (%s): %s", error.reason, error)
        self._unusable(f"{error.reason}: {error}", error.reason)

    def count_failed(self, error: BaseException, where: str = "") -> None:
        """``where``: the place in the user's file, if it is known."""
        self.failed += 1
        sentence = f"{said(error)} ({where})" if where and where not in said(error) else said(error)
        # The whole traceback once per row; twenty of the same would hide everything else.
        log.warning("group failed: %s", sentence, exc_info=error if self.unusable_in_a_row == 0 else None)
        self._unusable(sentence, NO_SCORE if _is_missing_score(error) else FAILED)

    def raise_if_hopeless(self) -> None:
        if self.unusable_in_a_row >= CONSECUTIVE_LIMIT:
            raise GivingUpError(
                f"{self.unusable_in_a_row} groups in a row could not be used. The first: {self.first_error}",
                hint="Correct the environment or its configuration; its log has the traceback.",
            )
        if self.equal_in_a_row >= EQUAL_SCORES_LIMIT:
            raise GivingUpError(
                f"In {self.equal_in_a_row} groups in a row every score was the same, or the environment itself gave "
                "none: nothing to learn from.",
                hint="Make the task easier or the reward finer, or raise group_size.",
            )

    def metrics(self) -> dict[str, float]:
        named = {f"groups/dropped/{reason}": float(count) for reason, count in self.dropped.items()}
        dropped = float(sum(self.dropped.values()))
        return {
            "groups/sent": float(self.sent),
            "groups/failed": float(self.failed),
            "groups/dropped": dropped,
            # Atropos' names.
            "train/items_sent_to_api": float(self.sent),
            "train/items_rejected": dropped,
            **named,
        }

    def state(self, running: int) -> EnvState:
        """For ``env_state.json``."""
        return EnvState(
            time=now(),
            sent=self.sent,
            failed=self.failed,
            dropped=sum(self.dropped.values()),
            unusable_in_a_row=self.unusable_in_a_row,
            first_error=self.first_error,
            first_reason=self.first_reason,
            running=running,
        )

    def _unusable(self, sentence: str, reason: str) -> None:
        if not self.unusable_in_a_row:
            self.first_error, self.first_reason = sentence, reason
        self.unusable_in_a_row += 1


def _is_missing_score(error: BaseException) -> bool:
    """The error itself, or the one that made a group's rollouts fail."""
    return isinstance(error, MissingScoreError) or isinstance(error.__cause__, MissingScoreError)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass
class Interval:
    """Numbers over the sequences sent since the last metrics line."""

    lengths: list[int] = field(default_factory=list)
    """Trained tokens per sequence."""
    correct: list[bool] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """That making a group took, of those that were made and of those that were not."""

    def add_duration(self, seconds: float, *, made: bool) -> None:
        self.seconds[made].append(seconds)

    def add(self, data: ScoredData) -> None:
        self.lengths += [sum(mask != MASKED for mask in masks_T) for masks_T in data.masks]
        notes = [SequenceNotes.model_validate(one) for one in data.overrides or [{} for _ in data.scores]]
        for score, note in zip(data.scores, notes, strict=True):
            self.correct.append(note.reward_parts.get("correct", score) > 0)
            for name, value in note.reward_parts.items():
                self.parts.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        every = self.seconds[True] + self.seconds[False]
        kinds = {"task": every, "succeeded_task": self.seconds[True], "failed_task": self.seconds[False]}
        found = {
            f"train_perf/{kind}_duration_{name}": value
            for kind, seconds in kinds.items()
            for name, value in _spread(seconds).items()
        }
        if not self.lengths:
            return found
        return {
            **found,
            "train/percent_correct": _mean(self.correct),
            "train/completion_lengths": _mean(self.lengths),
            "train/completion_lengths_std": statistics.pstdev(self.lengths),
            "train/completion_lengths_max": float(max(self.lengths)),
            "train/completion_lengths_min": float(min(self.lengths)),
            "train/completion_lengths_p95": percentile(self.lengths, 0.95),
            **{f"reward/{name}": _mean(values) for name, values in self.parts.items()},
        }


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"mean": _mean(values), "std": statistics.pstdev(values), "max": max(values), "min": min(values)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

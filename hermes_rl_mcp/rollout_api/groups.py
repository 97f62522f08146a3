"""One scored group as it arrived: checked once, then carried as the bytes that go out again.

Invariant: a ``Group`` has G >= 1 sequences, all its lists fit together, and every number in it is finite. So whatever
reads it later, including a strict JSON parser, can.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hermes_rl_mcp.contracts.rollout_api import MASKED, TRAINED_FLAG, GroupNotes, ScoredData
from hermes_rl_mcp.errors import InvalidValueError

MAX_GROUPS = 4096
"""Of one request. A million tiny ones would keep a core busy for half a minute; a batch has some hundred."""
MAX_ERRORS_SHOWN = 20

Location = tuple[str | int, ...]


class _FiniteScoredData(ScoredData):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _ExactScoredData(ScoredData):
    """What can go out as it came in: nothing to coerce, nothing to drop."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_EXACT: TypeAdapter[ScoredData] = TypeAdapter(_ExactScoredData)
_FIELDS = [name.encode() for name in ScoredData.model_fields]
_NOT_EXACT = (b"\\", b"\n", b"\r", b"N", b"I")
"""Single bytes, which are found twenty times as fast as words. NaN and Infinity have these; a string may, too."""
_ONE: TypeAdapter[ScoredData] = TypeAdapter(_FiniteScoredData)
_MANY: TypeAdapter[list[ScoredData]] = TypeAdapter(list[_FiniteScoredData])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Group:
    """``raw`` is a JSON object with the 14 keys of ScoredData."""

    raw: bytes
    size: int
    env_id: int | None
    begun: int | None = None
    """Batches that were trained when it was begun."""
    allowed: int | None = None
    """Batches that may be trained between; with ``begun`` it says until when the group is good."""


class FieldError(InvalidValueError):
    """A request that is refused, with the place of each fault: what HTTP 422 carries."""

    def __init__(self, faults: Sequence[tuple[Location, str, str]]) -> None:
        """``faults`` are (location below the body, sentence, kind)."""
        super().__init__("; ".join(f"{'.'.join(map(str, place))}: {text}" for place, text, _ in faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[FieldError], tuple[tuple[tuple[Location, str, str], ...]]]:
        return type(self), (self.faults,)

    @classmethod
    def one(cls, place: Location, text: str, kind: str = "value_error") -> FieldError:
        return cls([(place, text, kind)])

    @classmethod
    def of(cls, error: ValidationError) -> FieldError:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return cls([(item["loc"], item["msg"], item["type"]) for item in found[:MAX_ERRORS_SHOWN]])


def decode_one(body: bytes) -> list[Group]:
    """The body of ``POST /scored_data``."""
    if exact := _exact(body):
        return [exact]
    try:
        data = _ONE.validate_json(body)
    except ValidationError as error:
        raise FieldError.of(error) from None
    return [_group(data, ())]


def decode_many(body: bytes) -> list[Group]:
    """The body of ``POST /scored_data_list``."""
    if body.count(b'"tokens"') > MAX_GROUPS:  # looked at before a million objects are made of it
        raise FieldError.one((), f"More than {MAX_GROUPS} groups in one request; send fewer at once.", "too_long")
    try:
        several = _MANY.validate_json(body)
    except ValidationError as error:
        raise FieldError.of(error) from None
    return [_group(data, (index,)) for index, data in enumerate(several)]


def _exact(body: bytes) -> Group | None:
    """The group with the very bytes of the body, which spares a third of the work; None if they cannot be kept.

    They can if every reader takes them for what was checked here: no key twice (the first would go unchecked), no
    escapes (which could hide one), no line ends (the journal has one event per line), no unknown keys, no NaN.
    """
    if not (body.startswith(b"{") and body.endswith(b"}")) or any(mark in body for mark in _NOT_EXACT):
        return None
    strings = list(_strings(body))
    if any(strings.count(name) > 1 for name in _FIELDS):
        return None
    try:
        data = _EXACT.validate_json(body)
    except ValidationError:
        return None
    _refuse_faulty(data, ())
    absent = b"".join(b',"%s":null' % name.encode() for name in ScoredData.model_fields.keys() - data.model_fields_set)
    return Group(body[:-1] + absent + b"}", len(data.tokens), data.env_id, *_age(data))


def _strings(body: bytes) -> Iterator[bytes]:
    """All strings of a JSON document without escapes."""
    begin = body.find(b'"') + 1
    while begin:
        end = body.find(b'"', begin)
        if end < 0:
            return
        yield body[begin:end]
        begin = body.find(b'"', end + 1) + 1


def _group(data: ScoredData, where: Location) -> Group:
    _refuse_faulty(data, where)
    return Group(_ONE.dump_json(data), len(data.tokens), data.env_id, *_age(data))


def _age(data: ScoredData) -> tuple[int | None, int | None]:
    """Other people's environments may use these keys for something else; then they say nothing."""
    try:
        notes = GroupNotes.model_validate(data.group_overrides or {}, strict=True)
    except ValidationError:
        return None, None
    return notes.begun_step, notes.max_batches_offpolicy


def _refuse_faulty(data: ScoredData, where: Location) -> None:
    faults = [((*where, *place), text, "value_error") for place, text in _faults(data)]
    if faults:
        raise FieldError(faults[:MAX_ERRORS_SHOWN])


def _faults(data: ScoredData) -> Iterator[tuple[Location, str]]:
    size = len(data.tokens)
    if data.env_id is not None and data.env_id < 0:
        yield ("env_id",), f"is {data.env_id}; an id that /register-env gave is 0 or more"
    if size == 0:
        yield ("tokens",), "holds no sequence; a group has at least one"
        return
    for index, tokens_T in enumerate(data.tokens):
        if not tokens_T:
            yield ("tokens", index), "is empty; a sequence has at least one token"
    if len(data.scores) != size:
        yield ("scores",), f"has {len(data.scores)} entries, tokens has {size} sequences"
    yield from _row_faults("masks", data.masks, data.tokens)
    yield from _mask_faults(data)
    optional_rows = {
        "advantages": data.advantages,
        "ref_logprobs": data.ref_logprobs,
        "inference_logprobs": data.inference_logprobs,
    }
    for field, rows in optional_rows.items():
        if rows:  # an empty list means absent: Atropos' default collect_trajectories sends it
            yield from _row_faults(field, rows, data.tokens)
    yield from _teacher_faults(data)
    if data.overrides and len(data.overrides) != size:
        yield ("overrides",), f"has {len(data.overrides)} entries, tokens has {size} sequences"
    yield from _message_faults(data)
    yield from _loose_faults(data)


def _row_faults(field: str, rows: Sequence[Sequence[Any]], tokens: list[list[int]]) -> Iterator[tuple[Location, str]]:
    if len(rows) != len(tokens):
        yield (field,), f"has {len(rows)} rows, tokens has {len(tokens)} sequences"
        return
    for index, (row_T, tokens_T) in enumerate(zip(rows, tokens, strict=True)):
        if len(row_T) != len(tokens_T):
            yield (field, index), f"has {len(row_T)} entries, tokens[{index}] has {len(tokens_T)}"


def _teacher_faults(data: ScoredData) -> Iterator[tuple[Location, str]]:
    """Of the two distillation fields: both or none, a row for each token or none, as many logprobs as ids."""
    ids, logprobs = data.distill_token_ids or [], data.distill_logprobs or []
    if bool(ids) != bool(logprobs):
        field, other = ("distill_logprobs", "distill_token_ids")[:: 1 if ids else -1]
        yield (field,), f"is absent; it comes with {other}"
        return
    for field, column in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
        if column and len(column) != len(data.tokens):
            yield (field,), f"has {len(column)} rows, tokens has {len(data.tokens)} sequences"
            return
    for index, (ids_TK, logprobs_TK) in enumerate(zip(ids, logprobs, strict=True)):
        length = len(data.tokens[index])
        for field, rows in (("distill_token_ids", ids_TK), ("distill_logprobs", logprobs_TK)):
            if len(rows) not in (0, length):
                yield (field, index), f"has {len(rows)} entries, tokens[{index}] has {length}"
        for position, (ids_K, logprobs_K) in enumerate(zip(ids_TK, logprobs_TK, strict=False)):
            if len(ids_K) != len(logprobs_K):
                text = f"has {len(logprobs_K)} entries, distill_token_ids[{index}][{position}] has {len(ids_K)}"
                yield ("distill_logprobs", index, position), text
                break
        if bool(ids_TK) != bool(logprobs_TK):
            yield ("distill_logprobs", index), "and distill_token_ids: one is empty, the other not"


def _mask_faults(data: ScoredData) -> Iterator[tuple[Location, str]]:
    for index, (mask_T, tokens_T) in enumerate(zip(data.masks, data.tokens, strict=False)):
        prompt = mask_T.count(MASKED)
        if mask_T[prompt:] == tokens_T[prompt:] and mask_T[:prompt] == [MASKED] * prompt:
            continue  # one prompt, one completion: the usual case, compared at C speed
        for position, (value, token) in enumerate(zip(mask_T, tokens_T, strict=False)):
            if value != MASKED and value != token and value != TRAINED_FLAG:
                yield (
                    ("masks", index, position),
                    f"is {value}; it must be {MASKED} (not trained) or the token there, {token}",
                )
                break


def _message_faults(data: ScoredData) -> Iterator[tuple[Location, str]]:
    for index, conversation in enumerate(data.messages or []):
        for turn, message in enumerate(conversation):
            for key in ("role", "content"):
                if key not in message:
                    yield ("messages", index, turn), f"has no '{key}'; every message has 'role' and 'content'"


def _loose_faults(data: ScoredData) -> Iterator[tuple[Location, str]]:
    """NaN and infinity in the parts whose form is free."""
    for field in ("messages", "generation_params", "overrides", "group_overrides", "images"):
        waiting: list[tuple[Location, Any]] = [((field,), getattr(data, field))]
        while waiting:
            place, value = waiting.pop()
            if isinstance(value, float):
                if not math.isfinite(value):
                    yield place, f"is {value}; numbers must be finite"
            elif isinstance(value, dict):
                waiting.extend(((*place, key), part) for key, part in value.items())
            elif isinstance(value, list):
                waiting.extend(((*place, index), part) for index, part in enumerate(value))

"""What Atropos' clients leave out: which policy answered, at which temperature, and how each answer ended.

Invariant: nothing is guessed. What cannot be found again in a sequence says None; only the policy version then falls
back to the oldest one that had a part in the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hermes_rl_mcp.contracts.rollout_api import MASKED, SequenceNotes
from hermes_rl_mcp.contracts.sampling_api import FinishReason


@dataclass(frozen=True)
class Answer:
    """One completion as the endpoint gave it: by token ids where it gives them, else by text."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    policy_version: int | None
    temperature: float | None


SAMPLED: ContextVar[list[Answer] | None] = ContextVar("sampled", default=None)
"""Of the group that is being made; tasks that it starts write into the same list."""


def note(answers: Iterable[Answer]) -> None:
    """Remembered for the group that asked, if one did."""
    if (register := SAMPLED.get()) is not None:
        register.extend(answers)


def ending(given: Any) -> FinishReason | None:
    """``stop`` or ``length`` out of a reply, sglang's object included."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    return kind if kind in ("stop", "length") else None


def with_notes(group: Mapping[str, Any], answers: Sequence[Answer], decode: Callable[[list[int]], str]) -> Any:
    """The group with ``SequenceNotes`` in ``overrides`` and its generation parameters. What the environment wrote there
    itself stays. ``decode`` makes text of token ids, special tokens left out."""
    tokens, masks = group.get("tokens") or [], group.get("masks") or []
    if not answers or len(masks) != len(tokens):
        return dict(group)
    versions = [one.policy_version for one in answers if one.policy_version is not None]
    notes = [_notes(_runs(masks_T), answers, min(versions, default=None), decode) for masks_T in masks]
    own = group.get("overrides") or [{} for _ in notes]
    if len(own) == len(notes):
        group = {**group, "overrides": [{**said, **(theirs or {})} for said, theirs in zip(notes, own, strict=True)]}
    temperatures = {one.temperature for one in answers}
    parameters = {
        "policy_version": min(versions, default=None),
        "temperature": temperatures.pop() if len(temperatures) == 1 else None,
    }
    return {**group, "generation_params": {**parameters, **(group.get("generation_params") or {})}}


def _runs(masks_T: Sequence[int]) -> list[list[int]]:
    """The stretches that are trained on, in their order."""
    runs: list[list[int]] = []
    before = MASKED
    for mask in masks_T:
        if mask != MASKED:
            if before == MASKED:
                runs.append([])
            runs[-1].append(mask)
        before = mask
    return runs


def _notes(
    runs: Sequence[list[int]], answers: Sequence[Answer], oldest: int | None, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    first = _found(runs[0], answers, decode) if runs else None
    last = (first if len(runs) == 1 else _found(runs[-1], answers, decode)) if runs else None
    said = SequenceNotes(
        policy_version=first.policy_version if first and first.policy_version is not None else oldest,
        finish_reason=last.finish_reason if last else None,
        temperature=first.temperature if first else None,
    )
    kept = {"policy_version", "finish_reason", "temperature"}
    return {name: value for name, value in said.model_dump(include=kept).items() if value is not None}


def _found(run: list[int], answers: Sequence[Answer], decode: Callable[[list[int]], str]) -> Answer | None:
    """The answer that this stretch is. Environments that make tokens of text strip it and put a role's name before."""
    exact = tuple(run)
    for one in answers:
        if one.ids and exact[: len(one.ids)] == one.ids:
            return one
    text = decode(run).strip()
    fitting = [one for one in answers if not one.ids and one.text.strip() and text.endswith(one.text.strip())]
    return max(fitting, key=lambda one: len(one.text), default=None)

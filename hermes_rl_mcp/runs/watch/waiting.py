"""Which process of a run waits for what, in one sentence. Pure functions of one look at the run.

The sentence names the process that the others wait for, or the one that could go on and does not; it never guesses at a
figure that was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.runs import START_ORDER, ProcessName
from hermes_rl_mcp.contracts.sampling_api import EVALUATING, SamplingHealth
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.runs.outcome import TITLES

_STILL_S = 10.0
"""Shorter silences are not worth a word."""
_HELD = {"stopped": "is stopped (SIGSTOP)", "tracing-stop": "is held by a debugger"}


@dataclass(frozen=True)
class Look:
    """What was seen of a running run at one moment. None = did not answer, or is not known."""

    api: HealthReply | None
    trainer: SamplingHealth | None
    env: EnvState | None
    states: Mapping[ProcessName, str | None]
    """The kernel's words."""
    groups_per_batch: int
    still_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each figure changed."""
    env_done: bool = False
    """The environment has ended, and may: all that the trainer needs is in the queue."""


class Waiting(NamedTuple):
    """``culprit`` is the process that would have to move."""

    words: str
    culprit: ProcessName


def waiting(look: Look) -> Waiting:
    """The first of the rules that applies: what stops a process comes before what it waits for."""
    for rule in _RULES:
        if found := rule(look):
            return found
    return Waiting("the trainer is between two batches", "trainer")


def _held(look: Look) -> Waiting | None:
    for name in START_ORDER:
        if words := _HELD.get(look.states.get(name) or ""):
            return Waiting(f"the {TITLES[name]} {words}", name)
    return None


def _silent(look: Look) -> Waiting | None:
    answers: dict[ProcessName, object] = {"api": look.api, "trainer": look.trainer}
    for name, answer in answers.items():
        if answer is None:
            blocked = " and is blocked in the kernel (disk?)" if look.states.get(name) == "disk-sleep" else ""
            return Waiting(f"the {TITLES[name]} does not answer{blocked}", name)
    return None


def _evaluating(look: Look) -> Waiting | None:
    assert look.trainer
    if look.trainer.phase != EVALUATING:
        return None
    still_s = look.still_s.get("activity", 0.0)
    silence = f", no token decoded for {still_s:.0f} s" if still_s >= _STILL_S else ""
    progress = (look.env.evaluating if look.env else "") or "not begun"
    return Waiting(f"training is complete; base and adapter answer held-out items ({progress}{silence})", "env")


def _training(look: Look) -> Waiting | None:
    assert look.api and look.trainer
    if not look.api.batches_out:
        return None
    still_s = look.still_s.get("activity", 0.0)
    if still_s < _STILL_S:
        return Waiting(f"the trainer trains a batch, step {look.trainer.step + 1}", "trainer")
    return Waiting(
        f"the trainer has had a batch for step {look.trainer.step + 1}, but has done nothing for {still_s:.0f} s "
        f"({look.trainer.phase})",
        "trainer",
    )


def _sampling(look: Look) -> Waiting | None:
    assert look.trainer
    requests = look.trainer.open_requests
    if not requests:
        return None
    still_s = look.still_s.get("activity", 0.0)
    silence = f", no token decoded for {still_s:.0f} s" if still_s >= _STILL_S else ""
    return Waiting(f"the environment waits for the sampler: {_count(requests, 'request')} open{silence}", "trainer")


def _not_taken(look: Look) -> Waiting | None:
    assert look.api and look.trainer
    if look.api.queue_size < look.groups_per_batch:
        return None
    return Waiting(
        f"a batch is ready ({_count(look.api.queue_size, 'group')} queued), but the trainer does not take it "
        f"({look.trainer.phase})",
        "trainer",
    )


def _no_batch(look: Look) -> Waiting | None:
    assert look.api
    queued = f"{look.api.queue_size} of {_count(look.groups_per_batch, 'group')} queued"
    head = f"the trainer waits for a batch: {queued}, "
    if look.env_done:
        return Waiting(head + "and the environment has ended", "env")
    if not look.api.environments:
        return Waiting(head + "and no environment is registered", "env")
    still_s = look.still_s.get("groups_received", 0.0)
    sent = f"has sent nothing for {still_s:.0f} s" if still_s >= _STILL_S else "sends groups"
    return Waiting(f"{head}the environment {sent} and has no request open at the sampler{_groups(look.env)}", "env")


def _groups(env: EnvState | None) -> str:
    """What the environment itself says of its groups."""
    if env is None:
        return ""
    if env.unusable_in_a_row:
        return f"; its last {_count(env.unusable_in_a_row, 'group')} could not be used"
    return f"; it is making {_count(env.running, 'group')}" if env.running else "; it is making none"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


_RULES: tuple[Callable[[Look], Waiting | None], ...] = (
    *(_held, _silent, _evaluating),
    *(_training, _sampling, _not_taken, _no_batch),
)

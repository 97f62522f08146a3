"""What one sampled group says about an environment: alignment, spread of scores, answers of the wrong form, time.

Pure judgements; ``TimedClient`` is the sampling client with a watch on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.env_checks import CheckFinding
from hermes_rl_mcp.contracts.rollout_api import MASKED, ScoredData, SequenceNotes
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.config import APIServerConfig
from hermes_rl_mcp.envs.endpoint import Prompt, SampleParams
from hermes_rl_mcp.envs.sampling import SamplingClient
from hermes_rl_mcp.envs.trajectory import Message, Trajectory

SLOW_OWN_S = 0.5
"""Per rollout outside sampling, beyond which it is worth a look."""
UNPARSED = 0.9
"""Share of answers of the wrong form from which on a model hardly ever gets a reward."""


class TimedClient(SamplingClient):
    """Knows for how long at least one of its calls was under way."""

    def __init__(self, configs: Sequence[APIServerConfig], tokenizer: Callable[[], Any]) -> None:
        super().__init__(configs, tokenizer)
        self.busy_s = 0.0
        self._under_way = 0
        self._since = 0.0

    async def fresh(
        self, prompt: Prompt, params: SampleParams, split: str, limit_tokens: int | None = None
    ) -> list[Trajectory]:
        with self._watch():
            return await super().fresh(prompt, params, split, limit_tokens)

    async def extend(
        self,
        trajectory: Trajectory,
        prompt_text: str,
        messages: list[Message] | None,
        params: SampleParams,
        split: str,
        limit_tokens: int | None = None,
    ) -> bool:
        with self._watch():
            return await super().extend(trajectory, prompt_text, messages, params, split, limit_tokens)

    async def openai_reply(self, messages: Sequence[Message], **params: Any) -> dict[str, Any]:
        with self._watch():
            return await super().openai_reply(messages, **params)

    @classmethod
    def like(cls, other: SamplingClient, tokenizer: Callable[[], Any]) -> TimedClient:
        """One that asks as ``other`` does."""
        made = cls(other.configs, tokenizer)
        made.reconnect_s, made.request_keys = other.reconnect_s, other.request_keys
        return made

    @contextmanager
    def _watch(self) -> Iterator[None]:
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.busy_s += time.monotonic() - self._since


def judge_group(
    env: BaseEnv, group: ScoredData, seconds: float, client: TimedClient | None, where: str
) -> Iterator[CheckFinding]:
    """Findings in the order in which a person would ask. ``where`` is the place that scores."""
    notes = [SequenceNotes.model_validate(one) for one in group.overrides or [{}] * len(group.scores)]
    yield alignment(env, group)
    yield spread(group.scores, where)
    yield form(notes)
    yield length(notes, env.config.max_token_length)
    yield pace(len(group.scores), seconds, client.busy_s if client else None, where)


def judge_prompt(env: BaseEnv, count: int, tokens: int, where: str) -> CheckFinding:
    """``count`` messages make a prompt of ``tokens``: does an answer have room behind it?"""
    name, text = "messages", f"{count} message{'s' * (count > 1)}, a prompt of {tokens} tokens"
    limits = {"max_token_trainer_length": env.trainer_max_tokens, "the model's context": _context_tokens(env.tokenizer)}
    longest, limit = min(((known, what) for what, known in limits.items() if known), default=(None, ""))
    wanted = env.config.max_token_length
    if longest is None or tokens + wanted <= longest:
        return CheckFinding(name=name, verdict="ok", found=text)
    room = longest - tokens
    if room < 1:
        text += f", and {limit} is {longest}: there is no room for an answer."
        fix = "Ask for less, show fewer tools (enabled_toolsets), or choose a model with more room."
        return CheckFinding(name=name, verdict="problem", found=text, fix=fix, where=where)
    text += f"; {limit} is {longest}, so an answer has {room} of max_token_length = {wanted}"
    if 2 * room >= longest:
        return CheckFinding(name=name, verdict="ok", found=text)
    fix = "Ask for less, show fewer tools (enabled_toolsets), or lower max_token_length to what answers need."
    return CheckFinding(name=name, verdict="warning", found=text, fix=fix, where=where)


def _context_tokens(tokenizer: Any) -> int | None:
    """Of the model whose tokenizer this is, where its folder says so."""
    try:
        found = json.loads((Path(tokenizer.name_or_path) / "config.json").read_text(encoding="utf-8"))
        return int(found["max_position_embeddings"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def alignment(env: BaseEnv, group: ScoredData) -> CheckFinding:
    """Lengths and values were checked before; here whether what is trained is what was said."""
    name = "alignment"
    for index, masks_T in enumerate(group.masks):
        trained = [mask for mask in masks_T if mask != MASKED]
        if not trained:
            text = f"sequence {index} has no token to train on: every mask is {MASKED}."
            return CheckFinding(name=name, verdict="problem", found=text, fix="Unmask the tokens the model wrote.")
        if masks_T[0] != MASKED:
            text = f"sequence {index} is trained on from its first token on, which is the prompt's."
            fix = f"Mask the prompt with {MASKED}; Trajectory.item does."
            return CheckFinding(name=name, verdict="problem", found=text, fix=fix)
    if strange := _other_words(env, group):
        fix = "Train on the ids that were sampled (Trajectory.item), not on ids made from a text."
        return CheckFinding(name=name, verdict="warning", found=strange, fix=fix)
    total = sum(len(tokens_T) for tokens_T in group.tokens)
    trained_count = sum(mask != MASKED for masks_T in group.masks for mask in masks_T)
    text = f"{trained_count} of {total} tokens are trained on, in {len(group.tokens)} sequences"
    if group.inference_logprobs is None:
        text += "; this endpoint gives no logprobs, so ids were made from its text"
    return CheckFinding(name=name, verdict="ok", found=text)


def spread(scores: Sequence[float], where: str) -> CheckFinding:
    """Without a difference there is nothing to learn."""
    low, high, mean = min(scores), max(scores), sum(scores) / len(scores)
    if low == high:
        text = f"all {len(scores)} scores are {low:g}: a group like this teaches nothing."
        fix = (
            "Seen now and then it is no harm. Otherwise make the task easier for this model, give part of the reward "
            "for less than all, or raise group_size."
        )
        return CheckFinding(name="reward spread", verdict="warning", found=text, fix=fix, where=where)
    text = f"{len(set(scores))} different scores of {len(scores)}: {low:.3g} to {high:.3g}, mean {mean:.3g}"
    return CheckFinding(name="reward spread", verdict="ok", found=text)


def form(notes: Sequence[SequenceNotes]) -> CheckFinding:
    """As the environment says, by ``parse_failed`` or by its reward part ``format``."""
    failed = [
        note.parse_failed if note.parse_failed is not None else note.reward_parts["format"] <= 0
        for note in notes
        if note.parse_failed is not None or "format" in note.reward_parts
    ]
    if not failed:
        text = "the environment has no reward part named format"
        return CheckFinding(name="parse errors", verdict="skipped", found=text)
    text = f"{sum(failed)} of {len(failed)} answers are not of the form that is asked for"
    if sum(failed) < UNPARSED * len(failed):
        return CheckFinding(name="parse errors", verdict="ok", found=text)
    fix = "Show the form in the prompt, or reward it a little by itself."
    return CheckFinding(name="parse errors", verdict="warning", found=text, fix=fix)


def length(notes: Sequence[SequenceNotes], limit: int) -> CheckFinding:
    """Answers cut off at ``limit`` tokens."""
    ends = [note.finish_reason == "length" for note in notes if note.finish_reason is not None]
    if not ends:
        text = "the environment keeps no finish reasons"
        return CheckFinding(name="truncation", verdict="skipped", found=text)
    text = f"{sum(ends)} of {len(ends)} answers were cut off at max_token_length = {limit}"
    if 2 * sum(ends) < len(ends):
        return CheckFinding(name="truncation", verdict="ok", found=text)
    return CheckFinding(name="truncation", verdict="warning", found=text, fix="Raise max_token_length.")


def pace(rollouts: int, seconds: float, sampling_s: float | None, where: str) -> CheckFinding:
    """``sampling_s``: with at least one sampling call under way; None = not known."""
    text = f"{rollouts} rollouts in {seconds:.1f} s, {seconds / rollouts:.3f} s each"
    if sampling_s is None:
        return CheckFinding(name="time", verdict="ok", found=text)
    own_s = max(0.0, seconds - sampling_s) / rollouts
    text += f"; {own_s * 1e3:.0f} ms of it outside sampling"
    if own_s < SLOW_OWN_S:
        return CheckFinding(name="time", verdict="ok", found=text)
    fix = (
        "A score_answer that is slow holds up all others: make it async, and put slow work into asyncio.to_thread. "
        "Tools and compute_reward have threads of their own; there see which command takes long."
    )
    return CheckFinding(name="time", verdict="warning", found=text, fix=fix, where=where)


def _other_words(env: BaseEnv, group: ScoredData) -> str:
    """A sentence if the trained tokens do not spell the assistant's turns; empty if they do, or nobody can say."""
    renderer = env.server.renderer
    for index, messages in enumerate(group.messages or []):
        said = [str(message.get("content") or "").strip() for message in messages if message.get("role") == "assistant"]
        pairs = zip(group.tokens[index], group.masks[index], strict=True)
        runs = [[token for token, _ in run] for own, run in groupby(pairs, lambda one: one[1] != MASKED) if own]
        # A turn with calls may be kept with the special tokens in which they are written.
        trained = ["".join(renderer.decode(run, special=special) for run in runs) for special in (False, True)]
        if said and said[-1] and not any(said[-1] in text for text in trained):
            return (
                f"sequence {index}: the tokens that are trained on do not contain its last answer, {said[-1][:60]!r}."
            )
    return ""

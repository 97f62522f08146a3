"""Completions in OpenAI's two shapes, whole or in chunks.

Invariant: the chunks of a choice add up to the choice of the whole reply, logprobs included.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hermes_rl_mcp.contracts.sampling_api import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    ChatReplyMessage,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    FinishReason,
    LikelyToken,
    Usage,
)
from trainer.backends.base import Sampler

_PART_OF_A_CHARACTER = "\ufffd"
Tops = Sequence[tuple[int, float]]
"""Token ids and logprobs."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token of a completion, and the likeliest ones at its place if they were asked for."""

    token_id: int
    logprob: float
    top: Tops = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion, or what is new of it."""

    index: int
    text: str
    tokens: Sequence[Sampled]
    finish_reason: FinishReason | None = None


class Shape(Protocol):
    """Chat or plain. One object per request: all its chunks have one id."""

    def whole(self, choices: Sequence[Choice], usage: Usage, policy_version: int) -> ChatReply | CompletionReply: ...
    def openings(self, count: int) -> list[str]:
        """Events before the first token, for ``count`` choices; JSON, as all events."""
        ...

    def event(self, choice: Choice, policy_version: int | None = None) -> str: ...
    def usage_event(self, usage: Usage) -> str: ...


class ChatShape:
    def __init__(self, sampler: Sampler, model: str, *, with_logprobs: bool) -> None:
        self._text_of = _texts(sampler)
        self._with_logprobs = with_logprobs
        self._id, self._created, self._model = f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model

    def whole(self, choices: Sequence[Choice], usage: Usage, policy_version: int) -> ChatReply:
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=one.index,
                    message=ChatReplyMessage(content=one.text),
                    finish_reason=one.finish_reason or "length",
                    logprobs=self._logprobs(one.tokens),
                )
                for one in choices
            ],
            usage=usage,
            policy_version=policy_version,
        )

    def openings(self, count: int) -> list[str]:
        delta = ChatDelta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index=index, delta=delta)]) for index in range(count)]

    def event(self, choice: Choice, policy_version: int | None = None) -> str:
        told = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=choice.text or None),
            finish_reason=choice.finish_reason,
            logprobs=self._logprobs(choice.tokens) if choice.tokens else None,
        )
        return self._chunk([told], policy_version=policy_version)

    def usage_event(self, usage: Usage) -> str:
        return self._chunk([], usage=usage)

    def _chunk(
        self, choices: list[ChatChunkChoice], *, usage: Usage | None = None, policy_version: int | None = None
    ) -> str:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            policy_version=policy_version,
        )
        # A delta without news is {}, while an open finish_reason is null.
        empty = {index: {"delta": _unset(choice.delta)} for index, choice in enumerate(choices)}
        return chunk.model_dump_json(exclude={"choices": empty} if empty else None)

    def _logprobs(self, tokens: Sequence[Sampled]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    **self._likely(one.token_id, one.logprob).model_dump(),
                    top_logprobs=[self._likely(*other) for other in one.top],
                )
                for one in tokens
            ]
        )

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        text = self._text_of(token_id)
        whole = _PART_OF_A_CHARACTER not in text
        return LikelyToken(token=text, logprob=logprob, bytes=list(text.encode()) if whole else None)


class CompletionShape:
    def __init__(self, sampler: Sampler, model: str, *, with_logprobs: bool) -> None:
        self._text_of = _texts(sampler)
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}
        """Characters of each choice's tokens so far."""
        self._id, self._created, self._model = f"cmpl-{uuid.uuid4().hex}", int(time.time()), model

    def whole(self, choices: Sequence[Choice], usage: Usage, policy_version: int) -> CompletionReply:
        return self._reply([self._choice(one) for one in choices], usage, policy_version)

    def openings(self, count: int) -> list[str]:
        return []

    def event(self, choice: Choice, policy_version: int | None = None) -> str:
        return self._reply([self._choice(choice)], None, policy_version).model_dump_json()

    def usage_event(self, usage: Usage) -> str:
        return self._reply([], usage, None).model_dump_json()

    def _reply(
        self, choices: list[CompletionChoice], usage: Usage | None, policy_version: int | None
    ) -> CompletionReply:
        return CompletionReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            policy_version=policy_version,
        )

    def _choice(self, choice: Choice) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            finish_reason=choice.finish_reason,
            logprobs=self._logprobs(choice) if self._with_logprobs else None,
        )

    def _logprobs(self, choice: Choice) -> CompletionLogprobs:
        texts = [self._text_of(one.token_id) for one in choice.tokens]
        offsets = []
        for text in texts:
            offsets.append(at := self._offsets.get(choice.index, 0))
            self._offsets[choice.index] = at + len(text)
        tops = [
            {self._text_of(token): logprob for token, logprob in [*one.top, (one.token_id, one.logprob)]}
            for one in choice.tokens
        ]
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[one.logprob for one in choice.tokens],
            top_logprobs=tops if any(one.top for one in choice.tokens) else None,
            text_offset=offsets,
        )


def _texts(sampler: Sampler) -> Callable[[int], str]:
    return lambda token_id: sampler.decode([token_id], skip_special=False)


def _unset(delta: ChatDelta) -> set[str]:
    return {name for name, value in delta if value is None}

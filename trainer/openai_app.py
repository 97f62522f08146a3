"""``/v1/completions`` and ``/v1/chat/completions``, whole or streamed as server-sent events.

Invariants: a request is refused before the first byte of a stream is sent, never by a stream that breaks off; a stream
that cannot go on says why in its last event; a stream whose client is gone is cancelled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from hermes_rl_mcp.contracts.sampling_api import ChatRequest, CompletionRequest, StreamOptions, Usage
from hermes_rl_mcp.errors import InvalidValueError
from trainer import sampling_requests as requests
from trainer.backends.base import Completion, Sampler, SampleRequest, SampleResult
from trainer.guard import error_content
from trainer.openai_replies import ChatShape, Choice, CompletionShape, Sampled, Shape, Tops
from trainer.service import Service
from trainer.text_stream import TextStream
from trainer.waiting import Drawing, answers

_NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""A proxy that collects the events of a stream makes it useless."""


def add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> JSONResponse | StreamingResponse:
        sampler, served = service.sampler(), service.model(body.model)
        asked = [
            requests.sample_request(
                sampler,
                ids,
                n=body.n,
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                stop=body.stop,
                seed=body.seed,
                adapter=served.adapter,
            )
            for ids in requests.prompts(sampler, body.prompt)
        ]
        shape = CompletionShape(sampler, served.name, with_logprobs=body.logprobs is not None)
        if body.stream:
            return _stream(sampler, asked, shape, body.stream_options, body.logprobs or 0)
        return await _whole(request, sampler, asked, shape, body.logprobs or 0)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> JSONResponse | StreamingResponse:
        sampler, served = service.sampler(), service.model(body.model)
        asked = requests.sample_request(
            sampler,
            sampler.render_chat(requests.chat_messages(body.messages), body.tools),
            n=body.n,
            max_tokens=body.max_completion_tokens or body.max_tokens or sampler.context_length,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=body.stop,
            seed=body.seed,
            adapter=served.adapter,
        )
        shape = ChatShape(sampler, served.name, with_logprobs=body.logprobs)
        top = (body.top_logprobs or 0) if body.logprobs else 0
        if body.stream:
            return _stream(sampler, [asked], shape, body.stream_options, top)
        return await _whole(request, sampler, [asked], shape, top)


async def _whole(
    request: Request, sampler: Sampler, asked: Sequence[SampleRequest], shape: Shape, top: int
) -> JSONResponse:
    results = await answers(request, [sampler.submit(one) for one in asked])
    choices: list[Choice] = []
    for one, result in zip(asked, results, strict=True):
        for completion in result.completions:
            text = requests.completion_text(sampler, one, completion)
            tokens = await _tokens(request, sampler, one, completion, top)
            choices.append(Choice(len(choices), text, tokens, completion.finish_reason))
    version = min(result.policy_version for result in results)
    return JSONResponse(shape.whole(choices, _usage(asked, results), version).model_dump())


async def _tokens(
    request: Request, sampler: Sampler, asked: SampleRequest, completion: Completion, top: int
) -> list[Sampled]:
    """With ``top`` the likeliest tokens at each place are computed behind the completion, by the weights of then."""
    tops: list[Tops] = [()] * len(completion.token_ids)
    if top:
        ids = [*asked.prompt_ids, *completion.token_ids]
        scoring = sampler.score(ids, asked.temperature or 1.0, top, adapter=asked.adapter)
        scores = (await answers(request, [scoring]))[0]
        tops = [position.top if position else () for position in scores.positions[len(asked.prompt_ids) :]]
    return [Sampled(*one) for one in zip(completion.token_ids, completion.logprobs, tops, strict=True)]


def _stream(
    sampler: Sampler, asked: Sequence[SampleRequest], shape: Shape, options: StreamOptions | None, top: int
) -> StreamingResponse:
    if top:
        raise InvalidValueError(
            "The likeliest tokens at each place cannot be streamed.",
            hint="Ask for the sampled token's logprob alone (top_logprobs 0), or send stream: false.",
        )
    drawing = Drawing(sampler, asked)
    events = _events(sampler, asked, shape, drawing, with_usage=options is not None and options.include_usage)
    return _Stream(drawing, events)


class _Stream(StreamingResponse):
    """Ends what it streams when its client goes away, wherever it is then."""

    def __init__(self, drawing: Drawing, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_NO_CACHE)
        self._drawing = drawing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._drawing.cancel()


async def _events(
    sampler: Sampler, asked: Sequence[SampleRequest], shape: Shape, drawing: Drawing, *, with_usage: bool
) -> AsyncIterator[str]:
    try:
        async for event in _chunks(sampler, asked, shape, drawing, with_usage=with_usage):
            yield f"data: {event}\n\n"
    except Exception as error:  # noqa: BLE001  the status line is sent; the reason can only go into the stream
        yield f"data: {json.dumps(error_content(500, f'The stream ended early: {error}.'))}\n\n"
    else:
        yield "data: [DONE]\n\n"


async def _chunks(
    sampler: Sampler, asked: Sequence[SampleRequest], shape: Shape, drawing: Drawing, *, with_usage: bool
) -> AsyncIterator[str]:
    """Choices are counted over all requests; each ends with its finish reason, when all are done."""
    firsts = list(accumulate((one.n for one in asked), initial=0))
    choices = [_Open(sampler, one, firsts[at] + index) for at, one in enumerate(asked) for index in range(one.n)]
    for event in shape.openings(len(choices)):
        yield event
    async for drawn in drawing.tokens():
        choice = choices[firsts[drawn.request] + drawn.completion]
        if fresh := choice.take(Sampled(drawn.token_id, drawn.logprob)):
            yield shape.event(fresh)
    results = drawing.results()
    completions = [completion for result in results for completion in result.completions]
    version = min(result.policy_version for result in results)
    for choice, completion in zip(choices, completions, strict=True):
        yield shape.event(choice.close(completion), version)
    if with_usage:
        yield shape.usage_event(_usage(asked, results))


class _Open:
    """A choice that is being streamed."""

    def __init__(self, sampler: Sampler, asked: SampleRequest, index: int) -> None:
        self._sampler, self._asked, self._index = sampler, asked, index
        self._text = TextStream(sampler.decode, asked.stop_strings)
        self._unsent: list[Sampled] = []
        self._sent = 0

    def take(self, token: Sampled) -> Choice | None:
        """What there is to send now; tokens that make no text yet come with those that do."""
        self._unsent.append(token)
        text = "" if token.token_id in self._asked.stop_token_ids else self._text.push(token.token_id)
        if not text:
            return None
        sent, self._unsent = self._unsent, []
        self._sent += len(sent)
        return Choice(self._index, text, sent)

    def close(self, completion: Completion) -> Choice:
        text = self._text.rest(requests.completion_text(self._sampler, self._asked, completion))
        tokens = [
            Sampled(token, logprob) for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        return Choice(self._index, text, tokens[self._sent :], completion.finish_reason)


def _usage(asked: Sequence[SampleRequest], results: Sequence[SampleResult]) -> Usage:
    prompt = sum(len(one.prompt_ids) for one in asked)
    completion = sum(len(one.token_ids) for result in results for one in result.completions)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)

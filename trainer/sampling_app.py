"""The HTTP surface of the sampler on port 8001: native, OpenAI and Atropos shapes.

Invariants: bad input gets a 400 with a sentence, never a 500; while the model is not there everything but /health gets
a 503 that says what is going on; a client that goes away takes its waiting requests with it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from hermes_rl_mcp.contracts.rollout_api import WandbInfoReply
from hermes_rl_mcp.contracts.sampling_api import (
    ChatChoice,
    ChatReply,
    ChatReplyMessage,
    ChatRequest,
    CompletionChoice,
    CompletionReply,
    CompletionRequest,
    GenerateRequest,
    LogprobsReply,
    LogprobsRequest,
    SamplingHealth,
    SglangReply,
    TokenLogprob,
    Usage,
    VllmReply,
)
from hermes_rl_mcp.errors import InvalidValueError
from trainer import sampling_requests as requests
from trainer.backends.base import Sampler, SampleRequest, SampleResult, SamplerUnavailableError
from trainer.guard import Guard, error_response

_DISCONNECT_POLL_S = 0.5
"""How soon a vanished client is noticed; costs one wake-up per waiting request."""
_RETRY_AFTER_S = "1"
_CLIENT_GONE = 499

Result = TypeVar("Result")


class Service(Protocol):
    """What the surface is a surface of."""

    def health(self) -> SamplingHealth: ...
    def wandb_info(self) -> WandbInfoReply: ...
    def sampler(self) -> Sampler | None:
        """None while there is none to ask."""
        ...


class _NotReadyError(Exception):
    """No sampler yet, or no longer."""


class _ClientGoneError(Exception):
    """Nobody waits for the answer."""


def create_app(service: Service, *, path_prefix: str = "", any_host: bool = False) -> ASGIApp:
    """The whole application behind its guard."""
    app = FastAPI(title="hermes-rl sampler", openapi_url=None)
    _add_error_answers(app, service)
    _add_information(app, service)
    _add_generate(app, service)
    _add_openai(app, service)
    return Guard(app, path_prefix=path_prefix, any_host=any_host)


def _add_error_answers(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        return error_response(400, f"{place}: {first['msg']}.")

    @app.exception_handler(InvalidValueError)
    async def refused(request: Request, error: InvalidValueError) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(_NotReadyError)
    @app.exception_handler(SamplerUnavailableError)
    async def not_ready(request: Request, error: Exception) -> JSONResponse:
        health = service.health()
        return error_response(503, f"The sampler is not ready: {health.phase}.", **{"Retry-After": _RETRY_AFTER_S})

    @app.exception_handler(_ClientGoneError)
    async def gone(request: Request, error: Exception) -> JSONResponse:
        return error_response(_CLIENT_GONE, "The client closed the connection.")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, f"{error.detail}.")


def _add_information(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> SamplingHealth:
        return service.health()

    @app.get("/wandb_info")
    async def wandb_info() -> WandbInfoReply:
        return service.wandb_info()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": service.health().model, "object": "model", "created": 0, "owned_by": "hermes-rl"}
        return {"object": "list", "data": [model]}


def _add_generate(app: FastAPI, service: Service) -> None:
    @app.post("/generate")
    @app.post("/generate/")
    async def generate(request: Request, body: GenerateRequest) -> SglangReply | list[SglangReply] | VllmReply:
        sampler = _sampler(service)
        if requests.is_vllm_shape(body):
            return await _generate_vllm(request, sampler, body)
        asked = requests.sglang_request(sampler, body)
        result = await _answer(request, sampler.submit(asked))
        replies = [
            requests.sglang_reply(sampler, asked, one, result.policy_version, with_text=body.return_text_in_logprobs)
            for one in result.completions
        ]
        return replies[0] if asked.n == 1 else replies

    @app.post("/logprobs")
    async def logprobs(request: Request, body: LogprobsRequest) -> LogprobsReply:
        sampler = _sampler(service)
        ids = body.input_ids if body.input_ids is not None else sampler.encode(body.text or "")
        requests.check_ids(sampler, ids)
        if len(ids) > sampler.context_length:
            raise InvalidValueError(f"{len(ids)} tokens do not fit the model's context of {sampler.context_length}.")
        scores = await _answer(request, sampler.score(ids, body.temperature))
        entries = [
            TokenLogprob(
                token_id=token,
                logprob=position.logprob if position else None,
                token=sampler.decode([token], skip_special=False) if body.return_text else None,
            )
            for token, position in zip(ids, scores.positions, strict=True)
        ]
        return LogprobsReply(logprobs=entries, num_tokens=len(ids), policy_version=scores.policy_version)


async def _generate_vllm(request: Request, sampler: Sampler, body: GenerateRequest) -> VllmReply:
    asked = requests.vllm_request(sampler, body)
    result = await _answer(request, sampler.submit(asked))
    scores = None
    if body.prompt_logprobs is not None and body.prompt_logprobs >= 0:
        temperature = asked.temperature or 1.0
        scores = await _answer(request, sampler.score(asked.prompt_ids, temperature, body.prompt_logprobs))
    return requests.vllm_reply(sampler, asked, result, scores)


def _add_openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> CompletionReply:
        sampler = _sampler(service)
        _refuse_stream(body.stream)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        asked = [
            requests.sample_request(
                sampler,
                sampler.encode(prompt),
                n=body.n,
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                stop=body.stop,
                seed=body.seed,
            )
            for prompt in prompts
        ]
        if not asked:
            raise InvalidValueError("prompt is an empty list.", hint="Send at least one prompt.")
        results = await _answers(request, [sampler.submit(one) for one in asked])
        texts = [
            (requests.completion_text(sampler, one, completion), completion.finish_reason)
            for one, result in zip(asked, results, strict=True)
            for completion in result.completions
        ]
        return CompletionReply(
            id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=service.health().model,
            choices=[CompletionChoice(index=at, text=text, finish_reason=end) for at, (text, end) in enumerate(texts)],
            usage=_usage(asked, results),
            policy_version=min(result.policy_version for result in results),
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> ChatReply:
        sampler = _sampler(service)
        _refuse_stream(body.stream)
        prompt = sampler.render_chat(requests.chat_messages(body.messages), body.tools)
        asked = requests.sample_request(
            sampler,
            prompt,
            n=body.n,
            max_tokens=body.max_completion_tokens or body.max_tokens or sampler.context_length,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=body.stop,
            seed=body.seed,
        )
        result = await _answer(request, sampler.submit(asked))
        choices = [
            ChatChoice(
                index=at,
                message=ChatReplyMessage(content=requests.completion_text(sampler, asked, one)),
                finish_reason=one.finish_reason,
            )
            for at, one in enumerate(result.completions)
        ]
        return ChatReply(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=service.health().model,
            choices=choices,
            usage=_usage([asked], [result]),
            policy_version=result.policy_version,
        )


def _sampler(service: Service) -> Sampler:
    sampler = service.sampler()
    if sampler is None:
        raise _NotReadyError
    return sampler


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise InvalidValueError("Streaming is not supported.", hint="Send stream: false.")


def _usage(asked: Sequence[SampleRequest], results: Sequence[SampleResult]) -> Usage:
    prompt = sum(len(one.prompt_ids) for one in asked)
    completion = sum(len(one.token_ids) for result in results for one in result.completions)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


async def _answer(request: Request, future: Future[Result]) -> Result:
    return (await _answers(request, [future]))[0]


async def _answers(request: Request, futures: Sequence[Future[Result]]) -> list[Result]:
    """All results. When the client goes away, what has not started is cancelled."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    try:
        pending: set[asyncio.Future[Result]] = set(waiting)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_DISCONNECT_POLL_S)
            if pending and await request.is_disconnected():
                raise _ClientGoneError
        return [one.result() for one in waiting]
    finally:
        for future in waiting:
            future.cancel()

"""The HTTP surface of the sampler on port 8001: native, OpenAI and Atropos shapes.

Invariants: bad input gets a 400 with a sentence, never a 500; while the model is not there everything but /health gets
a 503 that says what is going on; a client that goes away takes its requests with it.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from hermes_rl_mcp.contracts.rollout_api import WandbInfoReply
from hermes_rl_mcp.contracts.sampling_api import (
    GenerateRequest,
    LogprobsReply,
    LogprobsRequest,
    ModelList,
    SamplingHealth,
    ServedModel,
    SglangReply,
    TokenLogprob,
    VllmReply,
)
from hermes_rl_mcp.errors import InvalidValueError
from trainer import sampling_requests as requests
from trainer.backends.base import Sampler, SamplerUnavailableError
from trainer.guard import Guard, error_response
from trainer.openai_app import add_openai
from trainer.service import NotReadyError, Service, UnknownModelError
from trainer.waiting import ClientGoneError, answer

_RETRY_AFTER_S = "1"
_CLIENT_GONE = 499


def create_app(service: Service, *, path_prefix: str = "", any_host: bool = False) -> ASGIApp:
    """The whole application behind its guard."""
    app = FastAPI(title="hermes-rl sampler", openapi_url=None)
    _add_error_answers(app, service)
    _add_information(app, service)
    _add_generate(app, service)
    add_openai(app, service)
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

    @app.exception_handler(NotReadyError)
    @app.exception_handler(SamplerUnavailableError)
    async def not_ready(request: Request, error: Exception) -> JSONResponse:
        health = service.health()
        return error_response(503, f"The sampler is not ready: {health.phase}.", **{"Retry-After": _RETRY_AFTER_S})

    @app.exception_handler(UnknownModelError)
    async def unknown_model(request: Request, error: UnknownModelError) -> JSONResponse:
        return error_response(404, str(error), code="model_not_found")

    @app.exception_handler(ClientGoneError)
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
    async def models() -> ModelList:
        base = service.health().model
        return ModelList(
            data=[
                ServedModel(id=one.name, parent=base if one.adapter and one.name != base else None)
                for one in service.models()
            ]
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ServedModel:
        return next(one for one in (await models()).data if one.id == service.model(name).name)


def _add_generate(app: FastAPI, service: Service) -> None:
    @app.post("/generate")
    @app.post("/generate/")
    async def generate(request: Request, body: GenerateRequest) -> SglangReply | list[SglangReply] | VllmReply:
        sampler = service.sampler()
        if requests.is_vllm_shape(body):
            return await _generate_vllm(request, sampler, body)
        asked = requests.sglang_request(sampler, body)
        result = await answer(request, sampler.submit(asked))
        scores = None
        if body.return_logprob and body.logprob_start_len >= 0:
            scores = await answer(
                request, sampler.score(asked.prompt_ids, 1.0, body.top_logprobs_num, adapter=asked.adapter)
            )
        replies = [requests.sglang_reply(sampler, asked, one, body, scores) for one in result.completions]
        return replies[0] if asked.n == 1 else replies

    @app.post("/logprobs")
    async def logprobs(request: Request, body: LogprobsRequest) -> LogprobsReply:
        sampler = service.sampler()
        ids = body.input_ids if body.input_ids is not None else sampler.encode(body.text or "")
        requests.check_ids(sampler, ids)
        if len(ids) > sampler.context_length:
            raise InvalidValueError(f"{len(ids)} tokens do not fit the model's context of {sampler.context_length}.")
        scores = await answer(request, sampler.score(ids, body.temperature))
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
    result = await answer(request, sampler.submit(asked))
    scores = None
    if body.prompt_logprobs is not None and body.prompt_logprobs >= 0:
        temperature = asked.temperature or 1.0
        scoring = sampler.score(asked.prompt_ids, temperature, body.prompt_logprobs, adapter=asked.adapter)
        scores = await answer(request, scoring)
    return requests.vllm_reply(sampler, asked, result, scores)

"""The HTTP rim: Atropos' paths, shapes and texts around ``Rollouts``.

Invariant: an answer of 200 to a submission is sent after the groups are stored; a refusal changes nothing. Every error
is JSON with ``detail``: a list of places and sentences with 422, a sentence otherwise. Paths that clients name
(``checkpoint_dir``) are handed on as text and never opened.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from hermes_rl_mcp.contracts.rollout_api import (
    AcknowledgeRequest,
    CheckpointedRequest,
    EnvIdentifier,
    EnvReport,
    RegisterEnv,
    Registration,
    RegistrationReply,
    StatusEnvReply,
)
from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.rollout_api.bodies import BadGzipError, BodyTooLargeError, inflate, is_gzip, read_body
from hermes_rl_mcp.rollout_api.delivery import StoredJSON, until_gone
from hermes_rl_mcp.rollout_api.env_status import env_status
from hermes_rl_mcp.rollout_api.groups import FieldError, Group, decode_many, decode_one
from hermes_rl_mcp.rollout_api.guard import Guard
from hermes_rl_mcp.rollout_api.news import News
from hermes_rl_mcp.rollout_api.repetitions import Submission
from hermes_rl_mcp.rollout_api.rollouts import Rollouts, TrainerNotRegisteredError, UnavailableError
from hermes_rl_mcp.rollout_api.state import BatchOut

ROOT_MESSAGE = "AtroposLib API"
INLINE_BYTES = 16 * 1024
"""A smaller body is decoded at once: handing it to a thread would take longer."""
EMPTY_EXAMPLE: dict[str, list[object]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}

LONGEST_WAIT_S = 60.0

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


class _Registration(Registration):
    model_config = ConfigDict(allow_inf_nan=False)


class _RegisterEnv(RegisterEnv):
    model_config = ConfigDict(allow_inf_nan=False)


def create_app(
    rollouts: Rollouts, *, nonce: str = "", path_prefix: str = "", any_host: bool = False, news: News | None = None
) -> Starlette:
    """``any_host``: also answer requests that name another host than loopback (the person asked for it). ``news``: to
    end the requests that wait, when the server ends."""
    rim = _Rim(rollouts, nonce, news or News())
    table: list[tuple[str, Sequence[str], Callable[[Request], object]]] = [
        ("/", ["GET"], rim.root),
        ("/health", ["GET"], rim.health),
        ("/register", ["POST"], rim.register),
        ("/register-env", ["POST"], rim.register_env),
        ("/disconnect-env", ["POST"], rim.disconnect_env),
        ("/wandb_info", ["GET"], rim.wandb_info),
        ("/info", ["GET"], rim.info),
        ("/batch", ["GET"], rim.batch),
        ("/acknowledge", ["POST"], rim.acknowledge),
        ("/checkpointed", ["POST"], rim.checkpointed),
        ("/latest_example", ["GET"], rim.latest_example),
        ("/scored_data", ["POST"], rim.scored_data),
        ("/scored_data_list", ["POST"], rim.scored_data_list),
        ("/status", ["GET"], rim.status),
        ("/status-env", ["GET"], rim.status_env),
        ("/reset_data", ["GET", "POST"], rim.reset_data),
    ]
    app = Starlette(
        routes=[_route(path, methods, endpoint) for path, methods, endpoint in table],
        middleware=[Middleware(Guard, path_prefix=path_prefix, any_host=any_host)],
        exception_handlers={
            FieldError: rim.on_field_error,
            BodyTooLargeError: _on(413),
            BadGzipError: lambda _, error: PlainTextResponse(str(error), status_code=400),
            NotFoundError: _on(404),
            UnavailableError: rim.on_unavailable,
            ClientDisconnect: _on(400),
            HTTPException: _on_http,
        },
    )
    app.router.redirect_slashes = False  # the redirect would lack the path prefix
    return app


def _route(path: str, methods: Sequence[str], endpoint: Callable[[Request], object]) -> Route:
    route = Route(path, endpoint, methods=list(methods))
    if route.methods:
        route.methods.discard("HEAD")  # added by the framework; a HEAD must not take a batch
    return route


class _Rim:
    """The endpoints. Threads beside the loop: two decode (one can inflate while the other parses), one compresses. Only
    the loop touches the state."""

    def __init__(self, rollouts: Rollouts, nonce: str, news: News) -> None:
        self._rollouts = rollouts
        self._nonce = nonce
        self._news = news
        rollouts.changed = news.tell
        self._decoder = ThreadPoolExecutor(2, thread_name_prefix="decode")
        self._compressor = ThreadPoolExecutor(1, thread_name_prefix="compress")

    # Requests

    async def _body(self, request: Request, limit: int) -> bytes:
        body = await read_body(request, limit)
        if not is_gzip(request):
            return body
        return await self._off_loop(len(body), lambda: inflate(body, limit))

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        if size < INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._decoder, work)

    async def _parse(self, request: Request, model: type[Model]) -> Model:
        try:
            return model.model_validate_json(await self._body(request, self._rollouts.limits.control_bytes))
        except ValidationError as error:
            raise FieldError.of(error) from None

    # Trainer

    async def root(self, _: Request) -> Response:
        return JSONResponse({"message": ROOT_MESSAGE})

    async def health(self, _: Request) -> Response:
        return _reply(self._rollouts.health(self._nonce))

    async def register(self, request: Request) -> Response:
        registration = await self._parse(request, _Registration)
        return _reply(RegistrationReply(uuid=self._rollouts.register(Registration(**registration.model_dump()))))

    async def batch(self, request: Request) -> Response | StoredJSON:
        leased = request.query_params.get("lease", "").lower() in ("1", "true")
        try:
            batch = await self._when_found(
                request, lambda: self._rollouts.hand_out(leased=leased), _wait_s(request.query_params.get("wait_s"))
            )
        except TrainerNotRegisteredError as error:
            # Atropos answers 200; who asks for a lease is ours and must not take the empty list for a batch.
            body = {"status": "error", "message": str(error), "batch": []}
            return JSONResponse(body, status_code=409 if leased else 200)
        if batch is None:
            return JSONResponse({"batch": None, "lease_id": None} if leased else {"batch": None})
        return self._deliver(batch)

    async def _when_found(self, request: Request, look: Callable[[], Result | None], wait_s: float) -> Result | None:
        """What ``look`` finds, within ``wait_s`` and while the client is there."""
        found = look()
        if found is not None or wait_s <= 0:
            return found
        gone = asyncio.ensure_future(until_gone(request.receive))
        try:
            return await self._news.until(look, wait_s, gone)
        finally:
            gone.cancel()

    def _deliver(self, batch: BatchOut) -> StoredJSON:
        def on_end(complete: bool) -> None:
            if complete:
                self._rollouts.written(batch.batch_id)
            else:
                self._rollouts.not_written(batch.batch_id)

        parts = [part for group in batch.groups.values() for part in (b",", group.raw)]
        parts[0] = b'{"batch":['
        parts.append(b'],"lease_id":"%s"}' % batch.batch_id.encode() if batch.leased else b"]}")
        return StoredJSON(parts, self._compressor, stall_s=self._rollouts.limits.write_stall_s, on_end=on_end)

    async def acknowledge(self, request: Request) -> Response:
        done = await self._parse(request, AcknowledgeRequest)
        self._rollouts.acknowledge(done.lease_id, retain=done.retain)
        return JSONResponse({"status": "success"})

    async def checkpointed(self, request: Request) -> Response:
        self._rollouts.checkpointed((await self._parse(request, CheckpointedRequest)).step)
        return JSONResponse({"status": "success"})

    # Environments

    async def register_env(self, request: Request) -> Response:
        wanted = await self._parse(request, _RegisterEnv)
        reply = self._rollouts.register_env(RegisterEnv(**wanted.model_dump()))
        return _reply(reply, exclude_none=True)

    async def disconnect_env(self, request: Request) -> Response:
        env_id = (await self._parse(request, EnvIdentifier)).env_id
        if self._rollouts.disconnect_env(env_id):
            return JSONResponse({"status": "success"})
        return JSONResponse({"status": "failure", "error": f"No environment has the id {env_id}."})

    async def scored_data(self, request: Request) -> Response:
        result = await self._submit(request, decode_one)
        if result.buffered:
            return JSONResponse({"status": "buffered", "buffer_size": result.buffer_size})
        return JSONResponse({"status": "received"})

    async def scored_data_list(self, request: Request) -> Response:
        result = await self._submit(request, decode_many)
        reply: dict[str, str | int] = {"status": "received", "groups_processed": result.groups}
        if result.buffered:
            reply |= {"buffered": result.buffered, "last_buffer_size": result.buffer_size}
        return JSONResponse(reply)

    async def _submit(self, request: Request, decode: Callable[[bytes], list[Group]]) -> Submission:
        body = await self._body(request, self._rollouts.limits.body_bytes)
        groups, digest = await self._off_loop(len(body), lambda: (decode(body), hashlib.sha256(body).hexdigest()))
        return self._rollouts.submit(groups, digest)

    async def status_env(self, request: Request) -> Response:
        """The id comes as a JSON body on GET (Atropos) or as ``?env_id=`` (proxies drop such bodies)."""
        asked = request.query_params.get("env_id")
        if asked is None:
            env_id = (await self._parse(request, EnvIdentifier)).env_id
        else:
            try:
                env_id = EnvIdentifier.model_validate({"env_id": asked}).env_id
            except ValidationError as error:
                raise FieldError.of(error) from None
        report = request.query_params.get("report")
        if report is None:
            return _reply(env_status(self._rollouts, env_id), exclude_none=True)
        return await self._status_by_report(request, env_id, report)

    async def _status_by_report(self, request: Request, env_id: int, text: str) -> Response:
        try:
            report = EnvReport.model_validate_json(text)
        except ValidationError as error:
            raise FieldError.of(error) from None
        if report.env_id != env_id:
            raise FieldError.one(("report", "env_id"), f"is {report.env_id}, but env_id is {env_id}")
        env_status(self._rollouts, env_id, report)  # refuses an unknown id
        if self._rollouts.pace.report(report):
            self._news.tell()

        def look() -> StatusEnvReply | None:
            status = env_status(self._rollouts, env_id, report)
            return status if status.room or status.current_step != report.known_step else None

        found = await self._when_found(request, look, report.wait_s)
        status = found or env_status(self._rollouts, env_id, report)
        if status.room:
            self._rollouts.pace.granted(env_id, status.current_step, status.room)
        return _reply(status)

    # Everybody

    async def wandb_info(self, _: Request) -> Response:
        return _reply(self._rollouts.wandb_info())

    async def info(self, _: Request) -> Response:
        return _reply(self._rollouts.info())

    async def status(self, _: Request) -> Response:
        return _reply(self._rollouts.status())

    async def latest_example(self, _: Request) -> Response | StoredJSON:
        latest = self._rollouts.state.latest
        if latest is None:
            return JSONResponse(EMPTY_EXAMPLE)
        return StoredJSON([latest.raw], self._compressor, stall_s=self._rollouts.limits.write_stall_s)

    async def reset_data(self, _: Request) -> Response:
        self._rollouts.reset()
        return PlainTextResponse("Reset successful")

    # Errors

    def on_field_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, FieldError)
        if request.url.path.endswith(("/scored_data", "/scored_data_list")):
            self._rollouts.refused += 1
        detail = [{"type": kind, "loc": ["body", *place], "msg": text} for place, text, kind in error.faults]
        return JSONResponse({"detail": detail}, status_code=422)

    def on_unavailable(self, _: Request, error: Exception) -> Response:
        retry = {"retry-after": str(self._rollouts.limits.retry_after_s)}
        return JSONResponse({"detail": str(error)}, status_code=503, headers=retry)


def _wait_s(asked: str | None) -> float:
    """As asked, within reason. Raises FieldError."""
    try:
        wait_s = float(asked or 0)
    except ValueError:
        wait_s = math.nan
    if not 0 <= wait_s <= LONGEST_WAIT_S:
        raise FieldError.one(("wait_s",), f"is {asked!r}; it must be 0 to {LONGEST_WAIT_S:g} seconds")
    return wait_s


def _reply(model: BaseModel, *, exclude_none: bool = False) -> Response:
    return Response(model.model_dump_json(exclude_none=exclude_none), media_type="application/json")


def _on(status: int) -> Callable[[Request, Exception], Response]:
    return lambda _, error: JSONResponse({"detail": str(error)}, status_code=status)


def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)

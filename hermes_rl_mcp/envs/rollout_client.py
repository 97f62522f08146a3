"""The environment's side of the rollout API.

Invariant: a group is encoded once and resent byte for byte, so that the API can recognise a copy after a lost answer.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from hermes_rl_mcp.contracts.rollout_api import (
    EnvReport,
    InfoReply,
    RegisterEnv,
    RegisterEnvReply,
    ScoredData,
    StatusEnvReply,
    WandbInfoReply,
)
from hermes_rl_mcp.envs.groups import BadGroupError
from hermes_rl_mcp.envs.saying import said
from hermes_rl_mcp.errors import EndpointError, NotFoundError

log = logging.getLogger(__name__)

GONE_S = 120.0
"""An API that restarts is back long before; one that is gone for this long ends the environment."""
REGISTER_POLL_S = 0.2
CALL_S = 30.0
"""One request on loopback, a large group included."""
GZIP_FROM_BYTES = 1024
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
BUSY = (429, 503)
LONGEST_RETRY_AFTER_S = 30.0

M = TypeVar("M", bound=BaseModel)


class UnregisteredError(NotFoundError):
    """The API does not know this environment (any more)."""


class RolloutClient:
    """One rollout API. Waits out a lost connection for ``gone_s``, and one that says it is busy for as long as it says
    so: its queue is full, and the trainer may take minutes for the step that makes room."""

    def __init__(self, url: str, gone_s: float = GONE_S) -> None:
        self.url = url.rstrip("/")
        self._gone_s = gone_s
        self._http = httpx.AsyncClient(timeout=CALL_S, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def register(self, body: RegisterEnv) -> RegisterEnvReply:
        """Asks until the trainer has started."""
        waited = False
        while True:
            response = await self._call("POST", "/register-env", json=body.model_dump())
            reply = self._parsed(response, RegisterEnvReply)
            if reply.status == "success" and reply.env_id is not None:
                return reply
            if not reply.status.startswith("wait"):
                raise EndpointError(f"The rollout API refused the registration: {response.text[:300]}")
            if not waited:
                log.info("registered with the rollout API; waiting for the trainer's first request")
                waited = True
            await asyncio.sleep(REGISTER_POLL_S)

    async def info(self) -> InfoReply:
        return self._parsed(await self._call("GET", "/info"), InfoReply)

    async def wandb_info(self) -> WandbInfoReply:
        return self._parsed(await self._call("GET", "/wandb_info"), WandbInfoReply)

    async def status(self, env_id: int, report: EnvReport | None = None) -> StatusEnvReply:
        """Raises UnregisteredError if the API forgot us. The id goes both ways that servers expect it; an API that does
        not know of reports answers at once, and without ``room``."""
        identity = {"env_id": env_id}
        params = {**identity, **({"report": report.model_dump_json()} if report else {})}
        response = await self._call("GET", "/status-env", params=params, json=identity, accept=(404,))
        if response.status_code == 404:
            raise UnregisteredError(f"The rollout API does not know environment {env_id}.")
        return self._parsed(response, StatusEnvReply)

    async def send(self, group: ScoredData) -> None:
        """Raises BadGroupError if the API refuses the group."""
        try:
            body = group.model_dump_json(exclude_none=True).encode()
        except ValueError as error:  # messages hold whatever the environment put there
            raise BadGroupError("invalid", f"it cannot be written as JSON: {said(error)}") from error
        headers = {"Content-Type": "application/json"}
        if len(body) >= GZIP_FROM_BYTES:
            body = gzip.compress(body, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        response = await self._call("POST", "/scored_data", content=body, headers=headers, accept=(400, 413, 422))
        if response.status_code != 200:
            raise BadGroupError("refused", f"the rollout API answered {response.status_code}: {response.text[:300]}")

    async def disconnect(self, env_id: int) -> None:
        """Best effort: at the end of a run the API may be gone already."""
        try:
            await self._http.post(f"{self.url}/disconnect-env", json={"env_id": env_id}, timeout=2.0)
        except httpx.HTTPError as error:
            log.info("could not say goodbye to the rollout API: %s", type(error).__name__)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, accept: tuple[int, ...] = (), **request: Any) -> httpx.Response:
        lost_since: float | None = None
        wait_s = FIRST_WAIT_S
        said = False
        while True:
            busy = False
            try:
                response = await self._http.request(method, f"{self.url}{path}", **request)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200 or response.status_code in accept:
                    return response
                if response.status_code < 500 and response.status_code != 429:
                    raise EndpointError(f"{method} {path} answered {response.status_code}: {response.text[:300]}")
                problem = f"status {response.status_code}: {response.text[:200]}"
                busy = response.status_code in BUSY
                wait_s = _retry_after_s(response, wait_s)
            lost_since = None if busy else lost_since or time.monotonic()
            if not said:
                said = True
                log.info("the rollout API does not take %s %s now (%s); trying again", method, path, problem)
            if lost_since is not None and time.monotonic() - lost_since > self._gone_s:
                raise EndpointError(
                    f"The rollout API did not take {method} {path} for {self._gone_s:.0f} s. Last: {problem}",
                    hint="See the API's log. A server started by hand must run at env.rollout_server_url.",
                )
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _parsed(self, response: httpx.Response, model: type[M]) -> M:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise EndpointError(
                f"{response.url} is not a rollout API: {response.text[:200]!r}",
                hint="Check env.rollout_server_url.",
            ) from error


def _retry_after_s(response: httpx.Response, otherwise: float) -> float:
    """What the server asks for, within reason."""
    asked = response.headers.get("retry-after", "")
    return min(max(float(asked), FIRST_WAIT_S), LONGEST_RETRY_AFTER_S) if asked.isdecimal() else otherwise

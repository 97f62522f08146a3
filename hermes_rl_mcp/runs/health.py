"""Readiness by asking: an HTTP answer that carries the run's nonce, never a delay and never an open port.

An answer without the nonce comes from a stranger and counts as no answer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import anyio
import httpx
from pydantic import BaseModel, ValidationError

from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.rollout_api import HealthReply
from hermes_rl_mcp.contracts.runs import ProcessName
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth

M = TypeVar("M", bound=BaseModel)
_POLL_S = 0.1
_REQUEST_TIMEOUT_S = 2.0
"""A health answer needs no work; one that is late is asked again, and a stop must not wait long for it."""


class Answer(NamedTuple):
    """What one question told. ``words`` says what is being waited for."""

    ready: bool
    words: str


class NotReadyError(Exception):
    """The deadline passed. Its text says what the last answer was."""


class Health:
    """Asks the servers of one run. Use as an async context manager."""

    def __init__(self, config: RunConfig) -> None:
        prefix = f"/{config.run.path_prefix}" if config.run.path_prefix else ""
        self._api = f"http://127.0.0.1:{config.ports.rollout_api}{prefix}"
        self._trainer = f"http://127.0.0.1:{config.ports.trainer}{prefix}"
        self._nonce = config.run.nonce
        # A proxy from the environment must never see, or answer, a question to our own loopback server.
        self._client = httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Health:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def ask(self, name: ProcessName) -> Answer:
        """How far this process is."""
        if name == "trainer":
            return await self._ask_trainer()
        return await (self._ask_api() if name == "api" else self._ask_env())

    async def rollouts(self) -> HealthReply | None:
        """The rollout API's own count; None if it does not answer."""
        found = await self._get(f"{self._api}/health", HealthReply)
        return found if isinstance(found, HealthReply) and found.nonce == self._nonce else None

    async def sampler(self) -> SamplingHealth | None:
        """The trainer's own word; None if it does not answer."""
        found = await self._get(f"{self._trainer}/health", SamplingHealth)
        return found if isinstance(found, SamplingHealth) and found.nonce == self._nonce else None

    async def _ask_api(self) -> Answer:
        found = await self._get(f"{self._api}/health", HealthReply)
        if isinstance(found, str):
            return Answer(False, f"waiting for the rollout API: {found}")
        return Answer(True, "") if found.nonce == self._nonce else _stranger("rollout API")

    async def _ask_trainer(self) -> Answer:
        found = await self._get(f"{self._trainer}/health", SamplingHealth)
        if isinstance(found, str):
            return Answer(False, f"waiting for the trainer: {found}")
        if found.nonce != self._nonce:
            return _stranger("trainer")
        return Answer(found.status == "ok", f"waiting for the trainer: {found.phase or found.status}")

    async def _ask_env(self) -> Answer:
        found = await self._get(f"{self._api}/health", HealthReply)
        if isinstance(found, str):
            return Answer(False, f"waiting for the environment: rollout API: {found}")
        if found.nonce != self._nonce:
            return _stranger("rollout API")
        return Answer(found.environments >= 1, "waiting for the environment to load its data and register")

    async def _get(self, url: str, model: type[M]) -> M | str:
        """The reply, or in words why there is none."""
        try:
            with anyio.fail_after(2 * _REQUEST_TIMEOUT_S):  # httpx bounds each read, and an answer may drip
                response = await self._client.get(url)
        except httpx.ConnectError:
            return "its server does not listen yet"
        except TimeoutError:
            return "no whole answer"
        except httpx.HTTPError as error:
            return f"no answer ({type(error).__name__})"
        if response.status_code != 200:
            return f"it answered HTTP {response.status_code}"
        try:
            return model.model_validate_json(response.content)
        except ValidationError:
            return "its answer is not that of this program"


async def wait_ready(
    ask: Callable[[], Awaitable[Answer]],
    *,
    watch: Callable[[], Awaitable[None]],
    say: Callable[[str], None],
    limit_s: float,
) -> None:
    """Returns once ``ask`` says ready. ``watch`` runs before every question and raises if waiting is pointless (the
    process ended, a stop was asked for); ``say`` gets each answer's words. NotReadyError after ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while True:
        await watch()
        answer = await ask()
        if answer.ready:
            return
        say(answer.words)
        if time.monotonic() >= deadline:
            raise NotReadyError(f"not ready after {limit_s:g} s ({answer.words})")
        await anyio.sleep(_POLL_S)


def _stranger(what: str) -> Answer:
    return Answer(False, f"another program answers on the {what}'s port; its answers do not count")

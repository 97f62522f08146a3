"""The trainer's side of the trajectory API: register, lease a batch, acknowledge it once it is trained.

Invariant: a batch is acknowledged only after its step is on record. When an answer may have been lost, registering
again brings back what was handed out and not acknowledged; so no batch is lost silently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

import httpx
from pydantic import ValidationError

from hermes_rl_mcp.contracts.rollout_api import (
    AcknowledgeRequest,
    BatchReply,
    CheckpointedRequest,
    Registration,
    ScoredData,
)
from hermes_rl_mcp.errors import EndpointError

_REQUEST_TIMEOUT_S = 60.0
"""A large batch takes seconds to serialise; the API is on this machine."""
_NOTICE_TIMEOUT_S = 10.0
"""For what nothing depends on."""
_PATIENCE_S = 120.0
"""Failures in a row for so long mean that the API is gone."""
_FIRST_WAIT_S, _WAIT_S = 0.05, 0.5
"""How long one question for a batch may be held back by the API: until the first batch, whose start is measured with
it, and afterwards; also the longest delay of a stop meanwhile."""
_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.25
"""Between two questions to an API that answers at once: quick while steps are short, seldom while rollouts take
minutes."""

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class Lease:
    """A batch that is ours until it is acknowledged."""

    def __init__(self, groups: list[ScoredData], lease_id: str | None) -> None:
        self.groups = groups
        self.lease_id = lease_id


class RolloutClient:
    """Blocking; ``stopping`` ends every wait. ``on_answer`` is called after each good answer to a poll."""

    def __init__(
        self,
        base_url: str,
        http: httpx.Client,
        stopping: Event,
        on_answer: Callable[[], None] = lambda: None,
        patience_s: float = _PATIENCE_S,
        retain: bool = False,
    ) -> None:
        """``retain``: the API keeps trained batches until ``checkpointed`` covers them."""
        self._base_url = base_url.rstrip("/")
        self._http = http
        self._stopping = stopping
        self._on_answer = on_answer
        self._patience_s = patience_s
        self._retain = retain
        self._registration: Registration | None = None
        self._answer_lost = False
        self._wait_s = 0.0
        """The first question is answered at once: it says that we are there."""

    def register(self, registration: Registration) -> None:
        """Returns once the API has taken the registration, or when stopping."""
        self._registration = registration
        self._insist("register", lambda: self._post("/register", registration.model_dump_json()))

    def next_batch(self) -> Lease | None:
        """Waits for a batch; None when stopping."""
        pause_s = _FIRST_POLL_S
        while not self._stopping.is_set():
            asked = time.monotonic()
            if (lease := self._insist("fetch a batch", self._poll)) is not None:
                return lease
            if time.monotonic() - asked < self._wait_s / 2:
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)
        return None

    def acknowledge(self, lease: Lease) -> None:
        """The batch was trained. Does nothing for a batch that came without a lease."""
        if lease.lease_id is None:
            return
        body = AcknowledgeRequest(lease_id=lease.lease_id, retain=self._retain).model_dump_json()
        try:
            self._insist("acknowledge a batch", lambda: self._post("/acknowledge", body))
        except _UnknownLease as error:
            _log.warning(
                "the rollout API no longer knows lease %s (%s); its batch may come again", lease.lease_id, error
            )

    def checkpointed(self, step: int) -> None:
        """Tried once: what is kept too long is forgotten at the next checkpoint."""
        if not self._retain:
            return
        body = CheckpointedRequest(step=step).model_dump_json()
        try:
            self._post("/checkpointed", body, timeout_s=_NOTICE_TIMEOUT_S)
        except (httpx.TransportError, _Unavailable, EndpointError) as error:
            _log.warning("the rollout API did not take note of the checkpoint of step %d: %s", step, error)

    def _poll(self) -> Lease | None:
        if self._answer_lost:
            self._register_again()
        try:
            response = self._http.get(
                f"{self._base_url}/batch",
                params={"lease": "1", "wait_s": str(self._wait_s)},
                headers={"Accept-Encoding": "identity"},
                timeout=_REQUEST_TIMEOUT_S,
            )
            answer = _json(response)
        except (httpx.TransportError, _Unavailable):
            self._answer_lost = True
            raise
        if answer.get("status") == "error":
            _log.warning("the rollout API forgot the registration (%s); registering again", answer.get("message"))
            self._register_again()
            return None
        try:
            reply = BatchReply.model_validate(answer)
        except ValidationError as error:
            raise EndpointError(
                f"The rollout API answered /batch with something that is no batch: {error.errors()[0]['msg']}.",
                hint="Check that rollout_server_url points to the run's rollout API.",
            ) from error
        self._wait_s = _WAIT_S if reply.batch or self._wait_s == _WAIT_S else _FIRST_WAIT_S
        self._on_answer()
        return Lease(reply.batch, reply.lease_id) if reply.batch else None

    def _register_again(self) -> None:
        if self._registration is not None:
            self._post("/register", self._registration.model_dump_json())
        self._answer_lost = False

    def _post(self, path: str, body: str, timeout_s: float = _REQUEST_TIMEOUT_S) -> None:
        _json(
            self._http.post(
                self._base_url + path,
                content=body,
                headers={"Content-Type": "application/json"},
                timeout=timeout_s,
            )
        )

    def _insist(self, what: str, call: Callable[[], Result]) -> Result | None:
        """Repeat ``call`` over transport errors and 5xx answers; refusals are final. None when stopping, but it is
        tried once even then: a trained batch that is not acknowledged would come again."""
        first_failure: float | None = None
        pause_s = 0.1
        while True:
            try:
                return call()
            except (httpx.TransportError, _Unavailable) as error:
                now = time.monotonic()
                first_failure = first_failure or now
                if now - first_failure > self._patience_s:
                    raise EndpointError(
                        f"Could not {what}: the rollout API has not answered for {self._patience_s:.0f} s ({error!r}).",
                        hint="See the log of the rollout API (api_<run_id>.log).",
                    ) from error
                _log.info("could not %s yet (%r), trying again", what, error)
            if self._stopping.wait(pause_s):
                return None
            pause_s = min(pause_s * 1.5, 2.0)


class _Unavailable(Exception):
    """A 5xx answer: may pass."""


class _UnknownLease(Exception):
    """404 to an acknowledgement."""


def _json(response: httpx.Response) -> dict[str, object]:
    if response.status_code >= 500:
        raise _Unavailable(f"HTTP {response.status_code}")
    name = response.request.url.path.rsplit("/", 1)[-1]
    if response.status_code == 404 and name == "acknowledge":
        raise _UnknownLease(response.text[:200])
    not_registered = response.status_code == 409 and name == "batch"
    if response.status_code >= 400 and not not_registered:
        raise EndpointError(
            f"The rollout API refused {name} with HTTP {response.status_code}: {response.text[:300]}",
            hint="Check that batch_size is a multiple of group_size and that the run's processes belong together.",
        )
    answer = response.json()
    if not isinstance(answer, dict):
        raise EndpointError(f"The rollout API answered {type(answer).__name__} where an object was due.")
    return answer

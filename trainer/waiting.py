"""Waiting for the sampler on behalf of a client that may go away.

Invariant: when nobody waits any more, whatever was asked of the sampler is cancelled, also what is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

from fastapi import Request

from trainer.backends.base import Sampler, SampleRequest, SampleResult

_DISCONNECT_POLL_S = 0.5
"""How soon a vanished client is noticed; costs one wake-up per waiting request."""

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


async def answer(request: Request, future: Future[Result]) -> Result:
    """The result, or ClientGoneError once the client has closed the connection."""
    return (await answers(request, [future]))[0]


async def answers(request: Request, futures: Sequence[Future[Result]]) -> list[Result]:
    """All results, in order."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    try:
        pending: set[asyncio.Future[Result]] = set(waiting)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_DISCONNECT_POLL_S)
            if pending and await request.is_disconnected():
                raise ClientGoneError
        return [one.result() for one in waiting]
    finally:
        for future in waiting:
            future.cancel()


class Drawn(NamedTuple):
    """A token that was just drawn."""

    request: int
    """Which of the requests."""
    completion: int
    """Which of its completions."""
    token_id: int
    logprob: float


class Drawing:
    """Requests under way and their tokens as they are drawn. Make and use it on the event loop; ``cancel`` at the end
    in any case."""

    def __init__(self, sampler: Sampler, asked: Sequence[SampleRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Drawn | None] = asyncio.Queue()
        self._futures: list[Future[SampleResult]] = []
        for number, one in enumerate(asked):
            future = sampler.submit(one, lambda *token, number=number: self._put(Drawn(number, *token)))
            future.add_done_callback(lambda _: self._put(None))
            self._futures.append(future)

    async def tokens(self) -> AsyncIterator[Drawn]:
        """Until all requests are answered or have failed."""
        open_requests = len(self._futures)
        while open_requests:
            if (event := await self._events.get()) is None:
                open_requests -= 1
            else:
                yield event

    def results(self) -> list[SampleResult]:
        """Behind the last token. Raises what failed a request."""
        return [future.result() for future in self._futures]

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _put(self, event: Drawn | None) -> None:
        """On the compute thread."""
        with suppress(RuntimeError):  # the loop is closed: the server has ended, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

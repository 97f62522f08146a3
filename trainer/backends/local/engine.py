"""The one thread that computes: it decodes waiting requests together and runs training steps in between.

Invariants: sampling and training never compute at the same time; a job that changes weights starts only when no
completion is under way, so each completion belongs to one policy version; while such a job waits, or one that holds has
not been released, nothing new is admitted. A cancelled request is dropped, whether it still waits or is under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from trainer import out_of_memory
from trainer.backends.base import (
    Completion,
    EngineStats,
    OnToken,
    SampleRequest,
    SampleResult,
    SamplerUnavailableError,
)
from trainer.backends.local.decode import DecodeBatch, Row
from trainer.backends.local.model import LoadedModel

_PREFILL_TOKENS = 8192
"""Padded prompt tokens per prefill pass; bounds its activations."""
_CLOSE_TIMEOUT_S = 30.0
"""For the pass under way when the engine is closed; a pass of a large model takes seconds."""

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """A request, or a slice of one with more completions than rows fit at once."""

    request: SampleRequest
    first: int
    count: int
    answer: _Answer


@dataclass(slots=True)
class _Answer:
    future: Future[SampleResult]
    completions: list[Completion | None]
    on_token: OnToken | None
    version: int | None = None


@dataclass(slots=True)
class _Job:
    run: Callable[[], Any]
    future: Future[Any]
    exclusive: bool
    hold: bool


class Engine:
    """``version`` is read on the compute thread and returned with every sample."""

    def __init__(
        self, model: LoadedModel, *, max_rows: int, max_cache_tokens: int, seed: int, version: Callable[[], int]
    ) -> None:
        self._model = model
        self._max_rows = max_rows
        self._max_cache_tokens = max_cache_tokens
        self._version = version
        self._generator = torch.Generator(model.device).manual_seed(seed)
        self._batch = DecodeBatch(model, self._generator)
        self._wake = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._jobs: deque[_Job] = deque()
        self._owners: dict[int, _Answer] = {}
        self._next_owner = 0
        self._closed = False
        self._held = False
        self.failure: Exception | None = None
        """Why sampling cannot go on."""
        self._stats = EngineStats()
        self._jobs_begun = 0
        self._open = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def activity(self) -> int:
        """Passes and jobs so far."""
        return self._stats.forward_passes + self._jobs_begun

    @property
    def open_requests(self) -> int:
        """Requests without an answer."""
        return self._open

    def submit(self, request: SampleRequest, on_token: OnToken | None = None) -> Future[SampleResult]:
        """The future never counts as running: cancelling it always succeeds until it has its result, and takes rows
        that are under way out before the next pass. ``on_token`` must be quick: every pass waits for it."""
        answer = _Answer(Future(), [None] * request.n, on_token)
        slices = [
            _Request(request, first, min(self._max_rows, request.n - first), answer)
            for first in range(0, request.n, self._max_rows)
        ]
        with self._wake:
            self._refuse_if_closed()
            self._waiting.extend(slices)
            self._count_open(1)
            self._wake.notify()
        answer.future.add_done_callback(lambda future: self._count_open(-1))
        return answer.future

    def run(self, job: Callable[[], Result], *, exclusive: bool, hold: bool = False) -> Future[Result]:
        """Run ``job`` on the compute thread between two passes; an exclusive one only when no row is under way.

        With ``hold`` an exclusive job that returned leaves the engine to further exclusive jobs alone, until
        ``release``: weights can change over several jobs without a completion or a score in between. One that raises
        ends the hold.
        """
        if hold and not exclusive:
            raise ValueError("only an exclusive job can hold the engine")
        future: Future[Result] = Future()
        with self._wake:
            self._refuse_if_closed()
            self._jobs.append(_Job(job, future, exclusive, hold))
            self._wake.notify()
        return future

    def release(self) -> None:
        """End a hold; nothing happens if there is none."""
        with self._wake:
            self._held = False
            self._wake.notify()

    def random_state(self) -> str:
        """State of the generator behind unseeded requests, hexadecimal."""
        return bytes(self._generator.get_state().tolist()).hex()

    def set_random_state(self, state: str) -> None:
        self._generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))

    def close(self) -> None:
        """Fail what waits, let the pass under way end."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SamplerUnavailableError("the sampler is shutting down")

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._next_job_at() is not None or self._can_decode()):
                    self._wake.wait()
                if self._closed:
                    break
                job = self._next_job()
                admitted = [] if self._jobs or job or self._held else self._take_waiting()
            if job is not None:
                self._run(job)
                continue
            self._decode(admitted)
        waiting: list[Future[Any]] = [request.answer.future for request in self._waiting]
        self._fail(
            SamplerUnavailableError("the sampler is shutting down"), waiting + [job.future for job in self._jobs]
        )

    def _next_job_at(self) -> int | None:
        """Place of the job to run now: jobs run in order, but only exclusive ones during a hold."""
        for at, job in enumerate(self._jobs):
            if job.exclusive or not self._held:
                return at if not (job.exclusive and self._batch.rows) else None
        return None

    def _next_job(self) -> _Job | None:
        at = self._next_job_at()
        if at is None:
            return None
        job = self._jobs[at]
        del self._jobs[at]
        return job

    def _can_decode(self) -> bool:
        return bool(self._batch.rows or (self._waiting and not self._held and not self._jobs))

    def _run(self, job: _Job) -> None:
        self._jobs_begun += 1
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = job.run()
        except BaseException as error:  # noqa: BLE001  whatever ended the job belongs to the one who waits for it
            if job.hold or self._held:
                self.release()
            job.future.set_exception(error)
        else:
            if job.hold:
                with self._wake:
                    self._held = True
            job.future.set_result(result)

    def _take_waiting(self) -> list[_Request]:
        """As many waiting requests, in order, as rows, cache and prefill allow; at least one if nothing runs."""
        taken: list[_Request] = []
        rows = len(self._batch.rows)
        width = self._batch.columns + max((row.budget for row in self._batch.rows), default=0)
        longest = 0
        while self._waiting:
            head = self._waiting[0]
            if head.answer.future.done():  # cancelled, or another slice of it failed
                self._waiting.popleft()
                continue
            width = max(width, len(head.request.prompt_ids) + head.request.max_tokens)
            longest = max(longest, len(head.request.prompt_ids))
            fits = rows + head.count <= self._max_rows and (rows + head.count) * width <= self._max_cache_tokens
            if not (fits and (len(taken) + 1) * longest <= _PREFILL_TOKENS) and (taken or self._batch.rows):
                break
            self._waiting.popleft()
            rows += head.count
            taken.append(head)
        return taken

    def _decode(self, admitted: list[_Request]) -> None:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                if given_up := {owner for owner, answer in self._owners.items() if answer.future.done()}:
                    self._batch.drop(given_up)
                if admitted:
                    groups = [self._rows(request) for request in admitted]
                    drawn = [row for group in groups for row in group]
                    finished = self._batch.admit(groups)
                else:
                    drawn = [row for row in self._batch.rows if not row.done]
                    finished = self._batch.step() if drawn else []
        except Exception as error:  # noqa: BLE001  a failed pass fails its requests; the thread must live on
            _log.exception("a sampling pass failed")
            if out_of_memory.kind(error):
                self.failure = error  # it will not be better next time, and nobody else would hear of it
            self._fail(error, [])
            return
        if drawn:
            self._count(drawn, time.perf_counter() - start, prefill=bool(admitted))
        for row in drawn:
            if on_token := self._owners[row.owner].on_token:
                on_token(row.index, row.completion.token_ids[-1], row.completion.logprobs[-1])
        for row in finished:
            self._deliver(row)
        if finished or given_up:
            live = {row.owner for row in self._batch.rows if not row.done}
            self._owners = {owner: answer for owner, answer in self._owners.items() if owner in live}

    def _rows(self, request: _Request) -> list[Row]:
        owner = self._next_owner
        self._next_owner += 1
        answer = request.answer
        self._owners[owner] = answer
        version = self._version()
        answer.version = version if answer.version is None else min(answer.version, version)
        asked = request.request
        budget = min(asked.max_tokens, self._model.context_length - len(asked.prompt_ids))
        return [
            Row(asked, owner, index, budget, self._own_generator(asked.seed, index))
            for index in range(request.first, request.first + request.count)
        ]

    def _own_generator(self, seed: int | None, index: int) -> torch.Generator | None:
        """A seeded completion depends on its seed and its index alone, not on what shares its batch."""
        if seed is None:
            return None
        return torch.Generator(self._model.device).manual_seed((seed * 1_000_003 + index) % (1 << 63))

    def _deliver(self, row: Row) -> None:
        answer = self._owners[row.owner]
        answer.completions[row.index] = row.completion
        done = [completion for completion in answer.completions if completion is not None]
        if len(done) == len(answer.completions) and not answer.future.done():
            self._stats = replace(self._stats, requests=self._stats.requests + 1)
            with suppress(InvalidStateError):  # cancelled just now
                answer.future.set_result(SampleResult(done, answer.version or 0))

    def _count(self, drawn: list[Row], seconds: float, *, prefill: bool) -> None:
        stats = self._stats
        self._stats = replace(
            stats,
            sampled_tokens=stats.sampled_tokens + len(drawn),
            sample_s=stats.sample_s + seconds,
            forward_passes=stats.forward_passes + 1,
            prefill_passes=stats.prefill_passes + prefill,
            most_rows=max(stats.most_rows, len(drawn)),
            most_requests=max(stats.most_requests, len({row.owner for row in drawn})),
        )

    def _count_open(self, change: int) -> None:
        """Requests come from one thread, and are answered or cancelled on others."""
        with self._counting:
            self._open += change

    def _fail(self, error: Exception, further: list[Future[Any]]) -> None:
        """Fail every request under way, and ``further``."""
        under_way = [answer.future for answer in self._owners.values()]
        self._owners.clear()
        self._batch.clear()
        for future in [*under_way, *further]:
            with suppress(InvalidStateError):
                future.set_exception(error)

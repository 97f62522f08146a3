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
from collections.abc import Callable, Iterable
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
from trainer.backends.local.kv import Stretch
from trainer.backends.local.model import LoadedModel
from trainer.backends.local.prefix import PrefixCache
from trainer.backends.local.scheduler import Limits, Scheduler, Start, Waiting

_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Padded prompt tokens per prefill pass; bounds its activations. More make no pass faster."""
_PREFIX_SHARE = 8
"""One part in so many of the key-value memory is for what was computed before."""
_PREFIX_BYTES = 512 * 2**20
"""And at most this."""
_CLOSE_TIMEOUT_S = 30.0
"""For the pass under way when the engine is closed; a pass of a large model takes seconds."""

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Answer:
    future: Future[SampleResult]
    completions: list[Completion | None]
    on_token: OnToken | None

    def given_up(self) -> bool:
        """Cancelled, or failed with another completion of it."""
        return self.future.done()


@dataclass(slots=True)
class _Job:
    run: Callable[[], Any]
    future: Future[Any]
    exclusive: bool
    hold: bool


class Engine:
    """``version`` is read on the compute thread and returned with every sample."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_rows: int,
        max_cache_tokens: int,
        seed: int,
        version: Callable[[], int],
        cut: bool = False,
    ) -> None:
        """``cut``: completions under way when a job that holds is ready end with ``length`` in place of delaying it;
        those of an evaluation are finished all the same."""
        self._model = model
        self._version = version
        self._cut = cut
        self._generator = torch.Generator().manual_seed(seed)
        for_prefixes = min(
            max_cache_tokens // _PREFIX_SHARE,
            _PREFIX_BYTES // model.kv_bytes_per_token,
            max(0, max_cache_tokens - model.context_length),
        )
        self._prefix: PrefixCache[Stretch] = PrefixCache(for_prefixes)
        self._prefix_version = version()
        self._batch = DecodeBatch(model, self._generator, self._prefix)
        self._scheduler: Scheduler[_Answer] = Scheduler(
            Limits(
                rows=max_rows,
                cache_tokens=max_cache_tokens - for_prefixes,
                prefill_tokens=_PREFILL_TOKENS.get(model.device.type, _PREFILL_TOKENS["cpu"]),
                mixed_adapter=model.rows.complete,
                mixed_prefill=model.free_masks,
            )
        )
        self._wake = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._answers: dict[Row, _Answer] = {}
        """Of the rows under way."""
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
        that are under way out before the next pass. ``on_token`` must be quick: every pass waits for it.

        Raises InvalidValueError for a request that could never fit, SamplerUnavailableError after ``close``.
        """
        budget = min(request.max_tokens, self._model.context_length - len(request.prompt_ids))
        self._scheduler.refuse(request, budget)
        answer = _Answer(Future(), [None] * request.n, on_token)
        with self._wake:
            self._refuse_if_closed()
            self._scheduler.add(Waiting(request, budget, answer))
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
            if job is not None:
                self._run(job)
            else:
                self._decode()
        waiting: list[Future[Any]] = [one.ticket.future for one in self._scheduler.take_all()]
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
        return bool(self._batch.rows or (self._scheduler and not self._held and not self._jobs))

    def _run(self, job: _Job) -> None:
        self._jobs_begun += 1
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            result = job.run()
        except BaseException as error:  # noqa: BLE001  whatever ended the job belongs to the one who waits for it
            if job.hold or self._held:
                self.release()
            self._after(job)
            job.future.set_exception(error)
        else:
            if job.hold:
                with self._wake:
                    self._held = True
            self._after(job)
            job.future.set_result(result)

    def _after(self, job: _Job) -> None:
        if job.exclusive:  # it may have changed the weights, under whatever version
            self._prefix.forget(adapter=True)

    def _decode(self) -> None:
        """One pass, if there is one to do: a prefill of what may begin now, else one token for every row."""
        start = time.perf_counter()
        drawn: list[Row] = []
        try:
            with torch.inference_mode():
                self._batch.leave([row for row, answer in self._answers.items() if answer.given_up()])
                finished = self._cut_rows()
                starts = self._starts()
                if starts:
                    groups = self._groups(starts)
                    drawn = [row for group in groups for row in group]
                    finished += self._batch.admit(groups)
                elif self._batch.rows:
                    drawn = list(self._batch.rows)
                    finished += self._batch.step()
        except Exception as error:  # noqa: BLE001  a failed pass fails its requests; the thread must live on
            _log.exception("a sampling pass failed")
            if out_of_memory.kind(error):
                self.failure = error  # it will not be better next time, and nobody else would hear of it
            self._fail(error, [])
            return
        if drawn:
            self._count(drawn, time.perf_counter() - start, prefill=bool(starts))
        for row in drawn:
            self._tell(row)
        for row in finished:
            self._deliver(row)
        under_way = set(self._batch.rows)
        self._answers = {row: answer for row, answer in self._answers.items() if row in under_way}

    def _cut_rows(self) -> list[Row]:
        with self._wake:
            if not (self._cut and self._jobs and self._jobs[0].hold):
                return []
        rows = [row for row in self._batch.rows if not row.request.evaluation]
        self._batch.leave(rows)
        return rows

    def _starts(self) -> list[Start[_Answer]]:
        if (version := self._version()) != self._prefix_version:
            self._prefix.forget(adapter=True)
            self._prefix_version = version
        with self._wake:
            self._scheduler.discard(_Answer.given_up)
            if self._jobs:
                return []
            return self._scheduler.next_pass(
                self._batch.rows, lambda ids, adapter: self._prefix.longest(ids, adapter)[1]
            )

    def _groups(self, starts: Iterable[Start[_Answer]]) -> list[list[Row]]:
        """Rows of one prompt together, whoever asked for them."""
        groups: dict[tuple[tuple[int, ...], bool], list[Row]] = {}
        version = self._version()
        for start in starts:
            asked = start.waiting.request
            for index in range(start.first, start.first + start.count):
                row = Row(asked, index, start.waiting.budget, _own_generator(asked.seed, index))
                row.completion.policy_version = version if asked.adapter else 0  # 0 is the base, whatever was published
                self._answers[row] = start.waiting.ticket
                groups.setdefault((asked.prompt_ids, asked.adapter), []).append(row)
        return list(groups.values())

    def _tell(self, row: Row) -> None:
        answer = self._answers[row]
        if answer.on_token is None or answer.given_up():
            return
        try:
            answer.on_token(row.index, row.completion.token_ids[-1], row.completion.logprobs[-1])
        except Exception as error:  # noqa: BLE001  whose callback fails has failed alone; the others' rows go on
            _log.exception("a request's own callback failed")
            with suppress(InvalidStateError):
                answer.future.set_exception(error)

    def _deliver(self, row: Row) -> None:
        answer = self._answers[row]
        answer.completions[row.index] = row.completion
        done = [completion for completion in answer.completions if completion is not None]
        if len(done) == len(answer.completions) and not answer.given_up():
            self._stats = replace(self._stats, requests=self._stats.requests + 1)
            with suppress(InvalidStateError):  # cancelled just now
                answer.future.set_result(SampleResult(done, min(one.policy_version for one in done)))

    def _count(self, drawn: list[Row], seconds: float, *, prefill: bool) -> None:
        stats, counts = self._stats, self._batch.counts
        self._stats = replace(
            stats,
            sampled_tokens=stats.sampled_tokens + len(drawn),
            sample_s=stats.sample_s + seconds,
            forward_passes=stats.forward_passes + 1,
            prefill_passes=stats.prefill_passes + prefill,
            prompt_tokens=counts.computed,
            reused_tokens=counts.reused,
            most_rows=max(stats.most_rows, len(drawn)),
            most_requests=max(stats.most_requests, len({id(self._answers[row]) for row in drawn})),
        )

    def _count_open(self, change: int) -> None:
        """Requests come from one thread, and are answered or cancelled on others."""
        with self._counting:
            self._open += change

    def _fail(self, error: Exception, further: list[Future[Any]]) -> None:
        """Fail every request under way, and ``further``."""
        under_way = [answer.future for answer in self._answers.values()]
        self._answers.clear()
        self._batch.clear()
        self._prefix.forget(adapter=True)
        self._prefix.forget(adapter=False)
        for future in [*under_way, *further]:
            with suppress(InvalidStateError):
                future.set_exception(error)


def _own_generator(seed: int | None, index: int) -> torch.Generator | None:
    """A seeded completion depends on its seed and its index alone, not on what shares its batch."""
    if seed is None:
        return None
    return torch.Generator().manual_seed((seed * 1_000_003 + index) % (1 << 63))

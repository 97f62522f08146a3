"""Which waiting completions come next, as far as rows and key-value memory go. No torch, no threads.

Invariants: a completion begins only if its rows' longest possible sequences fit, so what has begun never fails for want
of memory; whoever is next and does not fit is waited for, nobody passes it; of evaluation and training the one with
fewer rows under way is next, so while both wait each has half; within each, first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hermes_rl_mcp.errors import InvalidValueError
from trainer.backends.base import SampleRequest
from trainer.backends.local.prefix import LEAST_TOKENS, common


class Load(Protocol):
    """A completion under way."""

    @property
    def request(self) -> SampleRequest: ...
    @property
    def full_length(self) -> int:
        """Tokens of its prompt and the most that may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    rows: int
    """Completions decoded together."""
    cache_tokens: int
    """Rows times the longest row's ``full_length``."""
    prefill_tokens: int
    """Padded prompt tokens of one pass; a longer prompt goes alone."""
    mixed_adapter: bool
    """One batch may hold rows with the adapter and rows without."""
    mixed_prefill: bool
    """A pass may hold prompts whose beginning is known beside others."""


Ticket = TypeVar("Ticket")


@dataclass(slots=True)
class Waiting(Generic[Ticket]):
    """A request some of whose completions have not begun."""

    request: SampleRequest
    budget: int
    """Tokens each completion may have."""
    ticket: Ticket
    """The caller's own."""
    begun: int = 0

    @property
    def full_length(self) -> int:
        return len(self.request.prompt_ids) + self.budget


@dataclass(frozen=True, slots=True)
class Start(Generic[Ticket]):
    """Completions ``first`` to ``first + count`` of a request begin now."""

    waiting: Waiting[Ticket]
    first: int
    count: int


class Scheduler(Generic[Ticket]):
    """Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._training: deque[Waiting[Ticket]] = deque()
        self._evaluation: deque[Waiting[Ticket]] = deque()
        self._evaluation_last = False

    def __len__(self) -> int:
        """Requests of which some completion has not begun."""
        return len(self._training) + len(self._evaluation)

    def refuse(self, request: SampleRequest, budget: int) -> None:
        """Raises InvalidValueError for what would never fit."""
        if budget < 1:
            raise InvalidValueError(
                f"The prompt has {len(request.prompt_ids)} tokens and leaves no room for another one.",
                hint="Shorten the prompt so that at least one token can follow.",
            )
        longest = len(request.prompt_ids) + budget
        if longest > self._limits.cache_tokens:
            raise InvalidValueError(
                f"Prompt and completion have up to {longest} tokens together; there is memory for "
                f"{self._limits.cache_tokens}.",
                hint="Ask for fewer tokens, or shorten the prompt.",
            )

    def add(self, waiting: Waiting[Ticket]) -> None:
        (self._evaluation if waiting.request.evaluation else self._training).append(waiting)

    def take_all(self) -> list[Waiting[Ticket]]:
        """Everything that waits, which is then gone."""
        every = [*self._training, *self._evaluation]
        self._training.clear()
        self._evaluation.clear()
        return every

    def discard(self, dead: Callable[[Ticket], bool]) -> list[Ticket]:
        """Take out those nobody waits for any more."""
        gone = [one.ticket for queue in (self._training, self._evaluation) for one in queue if dead(one.ticket)]
        if gone:
            self._training = deque(one for one in self._training if not dead(one.ticket))
            self._evaluation = deque(one for one in self._evaluation if not dead(one.ticket))
        return gone

    def next_pass(
        self, under_way: Sequence[Load], known: Callable[[tuple[int, ...], bool], int]
    ) -> list[Start[Ticket]]:
        """What one prefill pass is to begin; with nothing under way at least one completion, if any waits.

        ``known``: how many of a prompt's first tokens need not be computed, with the adapter or without. A prompt that
        shares a beginning with one of this pass waits for the next, where it is known.
        """
        taken: list[Start[Ticket]] = []
        prompts: dict[tuple[tuple[int, ...], bool], int] = {}
        rows = [len([row for row in under_way if row.request.evaluation == side]) for side in (False, True)]
        width = max((row.full_length for row in under_way), default=0)
        adapter = under_way[0].request.adapter if under_way else None
        while queue := self._fairest(rows[0], rows[1]):
            head = queue[0]
            asked = head.request
            width = max(width, head.full_length)
            room = min(self._limits.rows, self._limits.cache_tokens // width) - sum(rows)
            if room < 1 or not (self._limits.mixed_adapter or adapter in (None, asked.adapter)):
                break
            if (asked.prompt_ids, asked.adapter) not in prompts:
                length = known(asked.prompt_ids, asked.adapter)
                if prompts and not self._joins(prompts, asked, length):
                    break
                prompts[asked.prompt_ids, asked.adapter] = length
            adapter = asked.adapter
            count = min(room, asked.n - head.begun)
            taken.append(Start(head, head.begun, count))
            head.begun += count
            rows[asked.evaluation] += count
            self._evaluation_last = asked.evaluation
            if head.begun == asked.n:
                queue.popleft()
        return taken

    def _fairest(self, training_rows: int, evaluation_rows: int) -> deque[Waiting[Ticket]] | None:
        if not (self._training and self._evaluation):
            return self._training or self._evaluation or None
        if training_rows != evaluation_rows:
            return self._training if training_rows < evaluation_rows else self._evaluation
        return self._training if self._evaluation_last else self._evaluation

    def _joins(self, prompts: dict[tuple[tuple[int, ...], bool], int], asked: SampleRequest, known: int) -> bool:
        """Whether this prompt may be computed in one pass with those."""
        if not self._limits.mixed_prefill and (known or any(prompts.values())):
            return False
        widest = max(len(asked.prompt_ids) - known, *(len(ids) - length for (ids, _), length in prompts.items()))
        if (len(prompts) + 1) * widest > self._limits.prefill_tokens:
            return False
        return not any(
            adapter == asked.adapter and common(ids, asked.prompt_ids) >= known + LEAST_TOKENS
            for ids, adapter in prompts
        )

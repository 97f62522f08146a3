"""Which completions the sampler begins next: shares, order, memory, and prompts that can use what another computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from hermes_rl_mcp.errors import InvalidValueError
from trainer.backends.base import SampleRequest
from trainer.backends.local.prefix import LEAST_TOKENS
from trainer.backends.local.scheduler import Limits, Scheduler, Start, Waiting

LIMITS = Limits(rows=8, cache_tokens=800, prefill_tokens=100, mixed_adapter=True, mixed_prefill=True)


@dataclass
class Row:
    """A completion under way."""

    request: SampleRequest
    full_length: int


class Sampler:
    """The scheduler with rows that end when a test says so."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.scheduler: Scheduler[str] = Scheduler(limits)
        self.rows: list[tuple[str, Row]] = []
        self.known: dict[tuple[tuple[int, ...], bool], int] = {}

    def ask(self, name: str, ids: tuple[int, ...] | None = None, *, new: int = 10, **fields: object) -> None:
        prompt = ids if ids is not None else (sum(map(ord, name)), 1, 2)
        self.scheduler.add(Waiting(SampleRequest(prompt, **fields), new, name))  # type: ignore[arg-type]

    def begin(self) -> list[tuple[str, int, int]]:
        starts = self.scheduler.next_pass([row for _, row in self.rows], lambda *key: self.known.get(key, 0))
        for start in starts:
            row = Row(start.waiting.request, start.waiting.full_length)
            self.rows += [(start.waiting.ticket, row)] * start.count
        return [_short(start) for start in starts]

    def finish(self, name: str, count: int = 1) -> None:
        for _ in range(count):
            self.rows.remove(next(row for row in self.rows if row[0] == name))


def _short(start: Start[str]) -> tuple[str, int, int]:
    return start.waiting.ticket, start.first, start.count


def test_first_come_first_served_and_a_group_begins_as_far_as_there_is_room() -> None:
    sampler = Sampler()
    sampler.ask("a", n=5)
    sampler.ask("b", n=5)
    assert sampler.begin() == [("a", 0, 5), ("b", 0, 3)]
    assert sampler.begin() == []
    sampler.finish("a")
    assert sampler.begin() == [("b", 3, 1)]
    assert len(sampler.scheduler) == 1
    sampler.finish("a")
    assert sampler.begin() == [("b", 4, 1)]
    assert len(sampler.scheduler) == 0


def test_while_evaluation_and_training_both_wait_each_has_half_of_the_rows() -> None:
    sampler = Sampler()
    for number in range(20):
        sampler.ask(f"train{number}")
    sampler.begin()
    for number in range(20):
        sampler.ask(f"eval{number}", evaluation=True)
    began: list[str] = []
    while len(sampler.scheduler):
        sampler.finish(sampler.rows[0][0])
        began += [name for name, _, _ in sampler.begin()]
        evaluations = sum(row.request.evaluation for _, row in sampler.rows)
        if len(began) >= 4 and len(sampler.scheduler) > 8:
            assert evaluations == 4, began
    assert {"train19", "eval19"} <= set(began), "neither starves"


def test_evaluation_alone_may_have_every_row() -> None:
    sampler = Sampler()
    sampler.ask("eval", n=20, evaluation=True)
    assert sampler.begin() == [("eval", 0, 8)]


def test_rows_wait_for_memory_and_nobody_passes_the_one_that_waits() -> None:
    sampler = Sampler()
    sampler.ask("small", new=90, n=4)  # 93 columns each
    sampler.ask("large", new=397, n=2)  # 400 columns: two rows of that width are all there is
    sampler.ask("late", new=5)
    assert sampler.begin() == [("small", 0, 4)]
    for _ in range(2):
        sampler.finish("small")
        assert sampler.begin() == []
    sampler.finish("small")
    assert sampler.begin() == [("large", 0, 1)]
    sampler.finish("small")
    assert sampler.begin() == [("large", 1, 1)]
    sampler.finish("large", 2)
    assert sampler.begin() == [("late", 0, 1)]


def test_what_could_never_fit_is_refused_with_the_numbers() -> None:
    scheduler: Scheduler[str] = Scheduler(LIMITS)
    scheduler.refuse(SampleRequest((1, 2, 3)), 797)
    with pytest.raises(InvalidValueError, match="801 tokens together; there is memory for 800"):
        scheduler.refuse(SampleRequest((1, 2, 3)), 798)
    with pytest.raises(InvalidValueError, match="leaves no room"):
        scheduler.refuse(SampleRequest((1, 2, 3)), 0)


def test_equal_prompts_share_a_pass_and_a_common_beginning_waits_until_it_is_known() -> None:
    sampler = Sampler()
    system = tuple(range(LEAST_TOKENS))
    sampler.ask("a", (*system, 101))
    sampler.ask("same", (*system, 101))
    sampler.ask("b", (*system, 102))
    assert [name for name, _, _ in sampler.begin()] == ["a", "same"]
    sampler.known[(*system, 102), True] = len(system)
    assert [name for name, _, _ in sampler.begin()] == ["b"]


def test_with_the_adapter_and_without_share_no_beginning() -> None:
    sampler = Sampler()
    ids = tuple(range(40))
    sampler.ask("policy", ids)
    sampler.ask("base", ids, adapter=False)
    assert [name for name, _, _ in sampler.begin()] == ["policy", "base"]


def test_a_pass_takes_so_many_prompt_tokens_and_a_longer_prompt_goes_alone() -> None:
    sampler = Sampler()
    sampler.ask("long", tuple(range(150)))
    sampler.ask("b", tuple(range(1000, 1040)))
    sampler.ask("c", tuple(range(2000, 2040)))
    sampler.ask("d", tuple(range(3000, 3040)))
    assert [[name for name, _, _ in sampler.begin()] for _ in range(3)] == [["long"], ["b", "c"], ["d"]]


def test_a_model_with_one_adapter_state_per_batch_takes_turns() -> None:
    sampler = Sampler(replace(LIMITS, mixed_adapter=False))
    sampler.ask("a")
    sampler.ask("base", adapter=False)
    sampler.ask("b")
    assert [name for name, _, _ in sampler.begin()] == ["a"]
    assert sampler.begin() == []
    sampler.finish("a")
    assert [name for name, _, _ in sampler.begin()] == ["base"]
    sampler.finish("base")
    assert [name for name, _, _ in sampler.begin()] == ["b"]


def test_a_model_that_takes_no_gaps_prefills_known_beginnings_alone() -> None:
    sampler = Sampler(replace(LIMITS, mixed_prefill=False))
    for number in range(3):
        sampler.ask(str(number), tuple(range(1000 * number, 1000 * number + 30)))
    sampler.known[tuple(range(1000, 1030)), True] = 20
    assert [[name for name, _, _ in sampler.begin()] for _ in range(3)] == [["0"], ["1"], ["2"]]


def test_cancelled_requests_are_taken_out() -> None:
    sampler = Sampler()
    sampler.ask("a")
    sampler.ask("b", evaluation=True)
    assert sampler.scheduler.discard(lambda name: name == "b") == ["b"]
    assert sampler.begin() == [("a", 0, 1)]

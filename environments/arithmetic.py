"""Short sums with one rule: the answer is the number alone. Needs no data, no network and no big model.

Problems are made from a seed. About one in ten, chosen by a hash of its text, is kept for evaluation and never trained
on, whatever the seed. Invariant: the score is 1.0 for exactly the number and 0.0 for everything else.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, JsonValue, model_validator

from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Completion, EvalReport, Message, Score
from hermes_rl_mcp.envs.rewards.text import last_integer

HELD_OUT_ONE_IN = 10
DRAWS_PER_PROBLEM = 1000
"""Bound on redrawing; at one in ten the chance to need more is below 1e-45."""
REPEATS_AT_THE_END = 300
"""Held-out draws in a row that were all known already: there is (nearly) no other. Level 1 has ten in all."""

_BARE = re.compile(r"0|-?[1-9][0-9]*")


@dataclass(frozen=True)
class Problem:
    """``3+5=`` and 8."""

    text: str
    answer: int


def _one_digit_sum(rng: random.Random) -> Problem:
    return _sum(rng.randrange(10), rng.randrange(10))


def _two_digit_sum(rng: random.Random) -> Problem:
    return _sum(rng.randrange(10, 100), rng.randrange(10, 100))


def _sum_or_difference(rng: random.Random) -> Problem:
    left, right = rng.randrange(100), rng.randrange(100)
    return _sum(left, right) if rng.random() < 0.5 else Problem(f"{left}-{right}=", left - right)


def _product(rng: random.Random) -> Problem:
    left, right = rng.randrange(2, 100), rng.randrange(2, 10)
    return Problem(f"{left}*{right}=", left * right)


def _two_operations(rng: random.Random) -> Problem:
    first, left, right = rng.randrange(1, 100), rng.randrange(2, 10), rng.randrange(2, 10)
    if rng.random() < 0.5:
        return Problem(f"{first}+{left}*{right}=", first + left * right)
    return Problem(f"{first}-{left}*{right}=", first - left * right)


def _sum(left: int, right: int) -> Problem:
    return Problem(f"{left}+{right}=", left + right)


MAKERS: dict[int, Callable[[random.Random], Problem]] = {
    1: _one_digit_sum,
    2: _two_digit_sum,
    3: _sum_or_difference,
    4: _product,
    5: _two_operations,
}


def is_held_out(problem: Problem) -> bool:
    """Whether the problem is for evaluation only. Depends on its text alone, so runs with other seeds agree."""
    digest = hashlib.sha256(problem.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random, difficulty: int, *, held_out: bool = False) -> Problem:
    """The next problem of the wanted kind."""
    make = MAKERS[difficulty]
    for _ in range(DRAWS_PER_PROBLEM):
        problem = make(rng)
        if is_held_out(problem) == held_out:
            return problem
    raise AssertionError(f"difficulty {difficulty} has no problem with held_out={held_out}")


def evaluation_problems(difficulty: int, count: int) -> list[Problem]:
    """Up to ``count`` different held-out problems, always the same ones; fewer where there are no more."""
    rng = random.Random(f"evaluation:{difficulty}")
    found: dict[str, Problem] = {}
    repeats = 0
    while len(found) < count and repeats < REPEATS_AT_THE_END:
        problem = draw(rng, difficulty, held_out=True)
        repeats = repeats + 1 if problem.text in found else 0
        found[problem.text] = problem
    return list(found.values())


def mixed_evaluation_problems(levels: Sequence[int], count: int) -> list[Problem]:
    """``evaluation_problems`` of several levels in turn, alike many of each where there are enough."""
    each = [evaluation_problems(level, math.ceil(count / len(levels))) for level in levels]
    in_turn = [problem for problems in itertools.zip_longest(*each) for problem in problems if problem is not None]
    return in_turn[:count]


def grade(problem: Problem, text: str, finish_reason: str | None) -> Score:
    """``score`` = ``correct`` and ``format``.

    ``correct``: the last whole number in the answer is the right one, in whatever words. ``format``: the answer is a
    number and nothing else, right or wrong, and the model ended it itself. So ``train/percent_correct``, which follows
    ``correct``, says how often the model knows the answer, and ``reward/mean`` how often it also obeyed.
    """
    correct = last_integer(text) == problem.answer
    bare = finish_reason != "length" and _BARE.fullmatch(text) is not None
    return Score(float(correct and bare), {"correct": float(correct), "format": float(bare)})


class ArithmeticConfig(BaseEnvConfig):
    """The defaults are for ``builtin:tiny``: 60 steps of 64 answers take it from one in three to nine in ten."""

    difficulty: int = Field(1, ge=1, le=5)
    """1: one-digit sums, all that builtin:tiny knows. 2: two-digit sums. 3: sums and differences below 100. 4: products
    with one digit. 5: two operations. From 2 on take a larger model."""
    mixed_up_to: int | None = Field(None, ge=1, le=5)
    """Null = problems of ``difficulty`` alone. Else of every level from difficulty to this one, alike often."""
    seed: int = Field(0, ge=0)
    """Order of the training problems."""
    instruction: str = ""
    """Sentence put in front of each problem, for models that follow instructions ("Answer with the number only.").
    builtin:tiny was made without one."""
    eval_problems: int = Field(100, ge=1, le=10_000)
    """Most held-out problems asked in an evaluation; level 1 has about ten."""

    @model_validator(mode="after")
    def _levels_rise(self) -> ArithmeticConfig:
        if self.mixed_up_to is not None and self.mixed_up_to < self.difficulty:
            raise ValueError(f"mixed_up_to = {self.mixed_up_to} lies below difficulty = {self.difficulty}")
        return self

    @property
    def levels(self) -> list[int]:
        """Those that problems are drawn from."""
        return list(range(self.difficulty, (self.mixed_up_to or self.difficulty) + 1))


class ArithmeticEnv(BaseEnv):
    """Short sums with exact answers; learnable by builtin:tiny on a CPU within a minute."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"learning_rate": 1e-3, "lora_rank": 16, "lora_alpha": 32.0}
    typical_tokens = (8, 4)

    config: ArithmeticConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = ArithmeticConfig(
            group_size=8,
            batch_size=64,
            total_steps=60,
            max_token_length=12,  # "It is 18" and its end are 9 tokens of one byte
            max_batches_offpolicy=1,
            steps_per_eval=20,
            max_eval_workers=64,
            use_wandb=False,
            tokenizer_name="builtin:tiny",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        self._rng = random.Random(self.config.seed)
        self._drawn = 0

    async def get_next_item(self) -> Problem:
        self._drawn += 1
        return self._draw()

    def _draw(self) -> Problem:
        levels = self.config.levels
        return draw(self._rng, levels[0] if len(levels) == 1 else self._rng.choice(levels))

    def get_messages(self, item: Problem) -> list[Message]:
        instruction = self.config.instruction.strip()
        return [{"role": "user", "content": f"{instruction} {item.text}" if instruction else item.text}]

    def score_answer(self, item: Problem, completion: Completion) -> Score:
        return grade(item, completion.text, completion.finish_reason)

    async def get_eval_items(self, count: int) -> list[Problem]:
        return mixed_evaluation_problems(self.config.levels, count)

    async def evaluate_item(self, item: Problem) -> Score:
        """Right is what gets the reward: the number alone."""
        [trajectory] = await self.server.chat(self.get_messages(item), max_tokens=self.config.max_token_length)
        value = self.score_answer(item, trajectory.last).value
        return Score(value, {"correct": value})

    async def evaluate(self) -> EvalReport:
        """Every held-out problem once, by greedy decoding."""
        problems = mixed_evaluation_problems(self.config.levels, self.config.eval_problems)
        limit = asyncio.Semaphore(self.config.max_eval_workers)

        async def ask(problem: Problem) -> dict[str, Any]:
            async with limit:
                [trajectory] = await self.server.chat(
                    self.get_messages(problem), max_tokens=self.config.max_token_length, temperature=0.0, split="eval"
                )
            answer = trajectory.last
            score = grade(problem, answer.text, answer.finish_reason)
            return {
                "problem": problem.text,
                "gold": problem.answer,
                "answer": answer.text,
                "score": score.value,
                **score.parts,
            }

        samples = await asyncio.gather(*(ask(problem) for problem in problems))
        metrics = {
            "eval/percent_correct": _mean(sample["correct"] for sample in samples),
            "eval/percent_bare": _mean(sample["format"] for sample in samples),
            "eval/reward_mean": _mean(sample["score"] for sample in samples),
        }
        generation = {"temperature": 0.0, "max_tokens": self.config.max_token_length}
        return EvalReport(metrics, list(samples), generation)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "_drawn": self._drawn})

    def load_checkpoint(self) -> None:
        """Goes on in the order of problems where the interrupted run was."""
        super().load_checkpoint()
        self._rng = random.Random(self.config.seed)
        for _ in range(self._drawn):
            self._draw()


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    ArithmeticEnv.cli()

"""GSM8K: grade-school word problems, rewarded for the right number in a box.

The score is ``correct + format_weight * (format and not correct)``, so it stays within 0 and 1: 1 for the right number,
``format_weight`` for a wrong one in a box, 0 without a number in a box. Only the last ``\\boxed{...}`` after the last
``</think>`` counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Completion, EvalReport, Message, Score
from hermes_rl_mcp.envs.rewards.maths import hush, last_box, parse_number, same_number
from hermes_rl_mcp.errors import MissingExtraError, PreflightError

log = logging.getLogger(__name__)

HUB_NAME, HUB_CONFIG = "openai/gsm8k", "main"
SHUFFLE_SEED = 42
FILES = {"train": "train.jsonl", "test": "test.jsonl"}

INSTRUCTION = "Give the answer as a plain number without units inside \\boxed{}."
EXAMPLE: list[Message] = [
    {"role": "user", "content": f'How many times does the letter r occur in "strawberry"? {INSTRUCTION}'},
    {
        "role": "assistant",
        "content": "Letter by letter: s, t, r (1), a, w, b, e, r (2), r (3), y. That makes three. \\boxed{3}",
    },
]

_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Problem:
    """One problem whose gold answer math-verify can read."""

    question: str
    gold: str
    """The number after the last ``#``, without commas."""

    @cached_property
    def parsed(self) -> list[Any]:
        """Made at first use: the parser takes milliseconds, and a run sees a fraction of the problems."""
        return parse_number(self.gold)


def grade(text: str, gold: list[Any], format_weight: float) -> tuple[Score, list[Any]]:
    """The score with its parts ``correct`` and ``format``, and the number that was read."""
    box = last_box(text)
    number = parse_number(box) if box is not None else []
    correct = same_number(gold, number)
    parts = {"correct": float(correct), "format": float(bool(number))}
    return Score(1.0 if correct else format_weight * parts["format"], parts), number


class Gsm8kConfig(BaseEnvConfig):
    """Fields of the GSM8K environment."""

    data_dir: str | None = None
    """Folder with train.jsonl and test.jsonl ({"question", "answer"} per line). Null = openai/gsm8k from the Hub."""
    format_weight: float = Field(0.0, ge=0, le=1)
    """Score of a wrong number inside a box, which teaches a small model the form of an answer. 0 = only right answers
    count."""
    eval_limit: int | None = Field(None, ge=1)
    """Test problems per evaluation, the first of the shuffled test split. Null = all 1319."""

    @field_validator("data_dir")
    @classmethod
    def _has_files(cls, value: str | None) -> str | None:
        if value is None:
            return None
        folder = Path(value).expanduser().absolute()
        missing = [name for name in FILES.values() if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} has no {' and no '.join(missing)}")
        return str(folder)


class Gsm8kEnv(BaseEnv):
    """Grade-school math word problems (GSM8K) with exact boxed answers."""

    name = "gsm8k"
    env_config_cls = Gsm8kConfig
    typical_tokens = (200, 200)

    config: Gsm8kConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = Gsm8kConfig(
            group_size=8,
            batch_size=64,
            max_token_length=256,
            total_steps=50,
            max_batches_offpolicy=3,
            worker_timeout=3600,  # on a CPU a group of long answers takes minutes
            ensure_scores_are_not_same=False,
            eval_limit=200,
            use_wandb=False,
            tokenizer_name="builtin:smollm2-135m",
        )
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        hush()
        self.iter = 0
        self.train = await asyncio.to_thread(load_split, "train", self.config.data_dir)
        self.test = await asyncio.to_thread(load_split, "test", self.config.data_dir)

    async def get_next_item(self) -> Problem:
        problem = self.train[self.iter % len(self.train)]
        self.iter += 1
        return problem

    def get_messages(self, item: Problem) -> list[Message]:
        return [*EXAMPLE, {"role": "user", "content": f"{item.question} {INSTRUCTION}"}]

    def score_answer(self, item: Problem, completion: Completion) -> Score:
        return grade(completion.text, item.parsed, self.config.format_weight)[0]

    async def get_eval_items(self, count: int) -> list[Problem]:
        """Of the test split, without questions that the training split has as well."""
        trained = {problem.question for problem in self.train}
        return [problem for problem in self.test if problem.question not in trained][:count]

    async def evaluate(self) -> EvalReport:
        """The test split, one greedy answer each."""
        places = asyncio.Semaphore(self.config.max_eval_workers)
        problems = self.test[: self.config.eval_limit]
        samples = await asyncio.gather(*(self._ask(problem, places) for problem in problems))
        metrics = {
            "eval/percent_correct": _mean(sample["correct"] for sample in samples),
            "eval/percent_formatted": _mean(sample["formatted"] for sample in samples),
        }
        return EvalReport(metrics, samples, {"temperature": 0.0, "max_tokens": self.config.max_token_length})

    async def _ask(self, problem: Problem, places: asyncio.Semaphore) -> dict[str, Any]:
        async with places:
            [trajectory] = await self.server.chat(
                self.get_messages(problem), max_tokens=self.config.max_token_length, temperature=0.0, split="eval"
            )
        text = trajectory.last.text
        score, number = grade(text, problem.parsed, self.config.format_weight)
        return {
            "messages": trajectory.messages,
            "question": problem.question,
            "gold_answer": problem.gold,
            "gold_parsed": str(problem.parsed[0]),
            "model_parsed": str(number[0]) if number else None,
            "score": score.value,
            "correct": bool(score.parts["correct"]),
            "formatted": bool(score.parts["format"]),
            "finish_reason": trajectory.last.finish_reason,
            "response_after_think": text.rsplit("</think>", 1)[-1],
        }

    async def wandb_log(self, metrics: dict[str, float] | None = None) -> None:
        values = dict(metrics or {})
        if "reward/format" in values:
            values["train/percent_formatted"] = values["reward/format"]
        await super().wandb_log(values)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


def load_split(split: str, data_dir: str | None) -> list[Problem]:
    """All problems of one split in a fixed random order. Those whose gold answer cannot be read are left out."""
    rows = _from_folder(Path(data_dir) / FILES[split]) if data_dir else _from_hub(split)
    problems = []
    for row in rows:
        gold = row["answer"].rsplit("#", 1)[-1].replace(",", "").strip()
        if _PLAIN_NUMBER.fullmatch(gold) or parse_number(gold):
            problems.append(Problem(row["question"], gold))
    if len(problems) < len(rows):
        log.warning(
            "%d of %d %s problems have no readable answer: skipped", len(rows) - len(problems), len(rows), split
        )
    if not problems:
        raise PreflightError(f"There are no usable {split} problems in {data_dir or HUB_NAME}.")
    random.Random(SHUFFLE_SEED).shuffle(problems)
    return problems


def _from_folder(path: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    number = 0
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            number += 1
            if line.strip():
                row = json.loads(line)
                rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}.", hint="Correct data_dir.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"{path}:{number} is not a GSM8K line: {type(error).__name__}: {error}",
            hint='Each line is a JSON object with "question" and "answer".',
        ) from error
    return rows


def _from_hub(split: str) -> list[dict[str, str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError("Reading GSM8K from the Hub", "train") from error
    try:
        return [dict(row) for row in load_dataset(HUB_NAME, HUB_CONFIG, split=split)]
    except Exception as error:
        # The Hub's client raises a dozen unrelated classes; all mean the same to whoever started this.
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise PreflightError(
            f"{HUB_NAME} could not be loaded from the Hub: {type(error).__name__}: {first_line}",
            hint="Set data_dir to a folder with train.jsonl and test.jsonl, or make the Hub reachable.",
        ) from error


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    Gsm8kEnv.cli()

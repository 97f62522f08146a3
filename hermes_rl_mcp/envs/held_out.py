"""The evaluation at the end of a run: base against adapter on the same held-out items with the same seeds.

Both sides sample as training does (temperature 1 unless the environment asks otherwise), because that is what training
rewards: greedy decoding can hide a change of the odds, or make one look complete. Where an environment has fewer
held-out items than are to be asked, each is asked several times; then all there are were asked and only the sampling
is left to chance, so that intervals for independent answers are wide enough.

Invariant: ``evaluation.json`` is written once, whole, whatever happens: completed, skipped with a reason or failed with
one. Nothing that goes wrong here gets out, but a cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from hermes_rl_mcp.contracts.evaluation import answers_wanted
from hermes_rl_mcp.contracts.records import ArmScore, Evaluation
from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.envs.base import BaseEnv, Score
from hermes_rl_mcp.envs.groups import MissingScoreError
from hermes_rl_mcp.envs.intervals import arm_interval, difference_interval, verdict
from hermes_rl_mcp.envs.sampling import Arm
from hermes_rl_mcp.files import now, read_file, write_atomic
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_text

log = logging.getLogger(__name__)

LOST_SHARE = 0.1
"""Pairs of answers that may be left out. More might be lost for a reason that has to do with the score."""
SEED = 0
"""Of every evaluation, so that runs compare."""
_REASON_CHARS = 600
_PROGRESS_S = 2.0
_SEEDS_APART = 1_000_003


class _CannotEvaluateError(Exception):
    """Its text is the reason."""


@dataclass(frozen=True)
class _Answer:
    """One scored answer."""

    score: float
    correct: float | None
    """None where the environment does not say what is correct."""


class HeldOut:
    """The evaluation of one run. ``plan`` first; once ``due``, ``run``. ``secrets`` are masked in what is written."""

    def __init__(self, env: BaseEnv, run_dir: Path, secrets: Sequence[str] = (), seed: int = SEED) -> None:
        self._env = env
        self._paths = RunPaths(run_dir)
        self._secrets = tuple(secrets)
        self._seed = seed
        self._items: list[Any] = []
        self._repeats = 1
        self._step = 0
        self._began = self._said_at = time.monotonic()
        self.progress = ""
        """``base: 34 of 190 answers`` while it goes on."""

    async def plan(self, total_steps: int, batch_size: int) -> None:
        """Chooses the items. Where there are none that is written at once, so that nobody waits."""
        self._items = []
        with suppress(OSError):
            self._paths.evaluation.unlink(missing_ok=True)
        wanted, reason = answers_wanted(self._env.config.eval_items, total_steps, batch_size)
        try:
            found = list(await self._env.get_eval_items(wanted) or []) if wanted else []
        except Exception as error:
            # User code; training does not depend on it.
            log.warning("get_eval_items failed", exc_info=error)
            self._write(Evaluation(status="failed", reason=f"get_eval_items failed: {_said(error)}"))
            return
        if not found:
            reason = reason or f"the environment {self._env.env_name()} names no held-out items (get_eval_items)"
            log.info("no evaluation at the end: %s", reason)
            self._write(Evaluation(status="skipped", reason=reason))
            return
        self._items = found[:wanted]
        self._repeats = max(1, wanted // len(self._items))

    @property
    def planned(self) -> bool:
        """Whether there is something to evaluate, and it was not done yet."""
        return bool(self._items)

    def due(self) -> bool:
        """Whether the trainer has completed and waits for this."""
        if not self.planned:
            return False
        try:
            report = ChildReport.model_validate_json(read_file(self._paths.report("trainer")))
        except (OSError, ValidationError):
            return False
        self._step = report.step
        return report.status == "completed" and report.stays_s > 0

    async def run(self) -> None:
        """Asks all items on both sides and writes what came of it."""
        self._began = time.monotonic()
        count = len(self._items) * self._repeats
        log.info("evaluating base and adapter: %d held-out items, %d answers each side", len(self._items), count)
        try:
            found = await self._both(count)
        except asyncio.CancelledError:
            self._write(self._failed(f"it was ended before it was done ({self.progress or 'nothing yet'})"))
            raise
        except _CannotEvaluateError as error:
            found = self._failed(str(error))
        except Exception as error:
            # A run that completed does not fail for want of its evaluation.
            log.warning("the evaluation failed", exc_info=error)
            found = self._failed(_said(error))
        self._write(found)
        self._items, self.progress = [], ""
        log.info("evaluation: %s", found.verdict or found.reason)

    async def _both(self, count: int) -> Evaluation:
        base_N, base_version = await self._side("base", count, adapter=False)
        if base_version != 0:
            raise _CannotEvaluateError(
                f"the sampler answered with policy version {base_version} where the base (version 0) was asked for"
            )
        adapter_N, version = await self._side("adapter", count, adapter=True)
        pairs = [(b, a) for b, a in zip(base_N, adapter_N, strict=True) if b is not None and a is not None]
        if count - len(pairs) > LOST_SHARE * count:
            raise _CannotEvaluateError(f"{count - len(pairs)} of {count} pairs of answers could not be had or scored")
        exact = all(one.correct is not None for pair in pairs for one in pair)
        base, adapter = ([_value(pair[side], exact) for pair in pairs] for side in (0, 1))
        difference = fmean(adapter) - fmean(base)
        interval = difference_interval(base, adapter)
        return Evaluation(
            status="completed",
            step=self._step,
            items=len(self._items),
            repeats=self._repeats,
            left_out=count - len(pairs),
            seed=self._seed,
            measure="accuracy" if exact else "score",
            base=_arm_score(base, 0),
            adapter=_arm_score(adapter, version),
            difference=difference,
            low=interval.low,
            high=interval.high,
            verdict=verdict(difference, interval),
            **self._when(),
        )

    async def _side(self, name: str, count: int, *, adapter: bool) -> tuple[list[_Answer | None], int]:
        """The scored answers in order, None where there is none, and the one policy version that gave them."""
        places = asyncio.Semaphore(self._env.config.max_eval_workers)
        arms = [Arm(adapter, self._seed * _SEEDS_APART + index) for index in range(count)]
        answers: list[_Answer | None] = [None] * count
        done = lost = 0

        async def one(index: int) -> None:
            nonlocal done, lost
            async with places:
                try:
                    with self._env.server.on(arms[index]):
                        answers[index] = await self._answer(self._items[index % len(self._items)])
                except Exception as error:
                    # User code and its endpoints: counted, and few may be lost.
                    lost += 1
                    log.warning("%s, answer %d: %s", name, index, _said(error), exc_info=error if lost == 1 else None)
                    if lost > LOST_SHARE * count:
                        raise _CannotEvaluateError(f"{lost} of {count} answers failed. Last: {_said(error)}") from error
            done += 1
            self._say(f"{name}: {done} of {count} answers")

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(count):
                    tasks.create_task(one(index))
        except* _CannotEvaluateError as failures:
            raise failures.exceptions[0] from None
        versions = {version for arm in arms for version in arm.versions}
        if len(versions) != 1 or None in versions:
            found = ", ".join(sorted(map(str, versions))) or "none"
            raise _CannotEvaluateError(f"the answers must all be sampled from one policy version; they name: {found}")
        return answers, int(versions.pop() or 0)

    def _say(self, progress: str) -> None:
        self.progress = progress
        if time.monotonic() - self._said_at >= _PROGRESS_S:
            self._said_at = time.monotonic()
            log.info("evaluating, %s", progress)

    async def _answer(self, item: Any) -> _Answer:
        async with asyncio.timeout(self._env.config.worker_timeout):
            found = await self._env.evaluate_item(item)
        score = found if isinstance(found, Score) else Score(found)
        correct = score.parts.get("correct")
        answer = _Answer(float(score.value), None if correct is None else float(correct))
        if not math.isfinite(answer.score) or not math.isfinite(answer.correct or 0.0):
            raise MissingScoreError(f"evaluate_item gave {score}, which holds something that is no finite number")
        return answer

    def _failed(self, reason: str) -> Evaluation:
        return Evaluation(
            status="failed",
            reason=reason,
            step=self._step,
            items=len(self._items),
            repeats=self._repeats,
            seed=self._seed,
            **self._when(),
        )

    def _when(self) -> dict[str, Any]:
        return {"seconds": round(time.monotonic() - self._began, 3)}

    def _write(self, found: Evaluation) -> None:
        reason = redact_text(found.reason, self._secrets)[:_REASON_CHARS]
        text = found.model_copy(update={"reason": reason, "time": now()}).model_dump_json(indent=1) + "\n"
        try:
            write_atomic(self._paths.evaluation, text)
        except OSError as error:
            log.warning("cannot write %s: %s", self._paths.evaluation, error)


def _arm_score(scores_N: Sequence[float], version: int) -> ArmScore:
    low, high = arm_interval(scores_N)
    return ArmScore(accuracy=fmean(scores_N), low=low, high=high, policy_version=version)


def _value(answer: _Answer, exact: bool) -> float:
    return answer.correct if exact and answer.correct is not None else answer.score


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

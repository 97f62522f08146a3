"""The training loop: lease a batch, step, publish, record, acknowledge.

Invariants: step N is the N-th batch taken and has exactly one line in ``metrics.jsonl``; a batch is acknowledged only
after that line is written, and kept by its source until a checkpoint covers its step; a batch without signal changes
neither the weights nor the policy version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.records import Preview
from trainer.backends.base import Backend
from trainer.backends.training import (
    AdamParams,
    LossSettings,
    NonFiniteError,
    StepAbandonedError,
    StepResult,
    train_step,
)
from trainer.batching import OVERLONG, TrainingBatch, build_batch
from trainer.checkpoints import Checkpoints, Counters
from trainer.failures import CheckpointError, TrainingFailedError
from trainer.metrics import JsonLines, LastEvaluation, Metrics, StepTimes, finite, step_metrics, utc_now
from trainer.progress import ProgressFile
from trainer.rollout_client import Lease
from trainer.rollout_log import rollout_lines

_PREVIEW_TOKENS = 128
_CALMER = "Lower the learning rate or set grad_clip_norm to 1.0, then start again."
_ENDS = 5
"""Steps at either end whose mean reward is compared."""

_log = logging.getLogger(__name__)


class BatchSource(Protocol):
    """Where batches come from."""

    def next_batch(self) -> Lease | None: ...
    def acknowledge(self, lease: Lease) -> None: ...
    def checkpointed(self, step: int) -> None:
        """Batches up to this step need not come again."""
        ...


@dataclass(frozen=True)
class Recorders:
    """Where a step's results go."""

    metrics: JsonLines
    rollouts: JsonLines
    evaluation: LastEvaluation
    also: Callable[[int, Metrics], None]
    """Optional further sink; must not raise."""
    progress: ProgressFile


@dataclass(frozen=True)
class Outcome:
    """How the loop ended."""

    finished: bool
    """False: asked to stop."""
    checkpoint: Path | None
    reward_first5: float | None
    reward_last5: float | None
    preview: Preview | None
    overlong_sequences: int
    missing_logprobs: int
    malformed_groups: int


class Loop:
    """One run of the trainer."""

    def __init__(
        self,
        config: TrainerConfig,
        backend: Backend,
        source: BatchSource,
        checkpoints: Checkpoints,
        recorders: Recorders,
        *,
        total_steps: int,
        max_token_length: int,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        start: Counters | None = None,
        earlier_rewards: Sequence[float] = (),
    ) -> None:
        """``max_token_length`` is the environment's budget per completion. ``start`` and ``earlier_rewards`` (mean
        reward of each earlier step) are those of a resumed run."""
        self._config = config
        self._backend = backend
        self._source = source
        self._checkpoints = checkpoints
        self._recorders = recorders
        self._total_steps = total_steps
        self._preview_tokens = min(max_token_length, _PREVIEW_TOKENS)
        self._loss = LossSettings.of(config, max_token_length)
        self._stopping = stopping
        self._clock = clock
        self._counters = start or Counters(step=0, optimizer_steps=0, policy_version=0, steps_without_signal=0)
        self._rewards = list(earlier_rewards)
        self._preview_prompt: list[int] | None = None
        self._overlong = self._missing = self._malformed = 0
        self._step_began = clock()
        self._recorded = False
        """A step was taken since this process began."""
        self._stats = backend.stats

    @property
    def step(self) -> int:
        return self._counters.step

    def waiting(self) -> None:
        """Called while there is no batch yet."""
        if not (self._recorded or self._backend.open_requests or self._backend.stats.requests):
            self._step_began = self._clock()  # the environment is not there yet; that is no part of the first step
        tokens = self._backend.stats.sampled_tokens - self._stats.sampled_tokens
        self._recorders.progress.say(self._counters.step + 1, "sampling", f"{tokens} tokens so far")

    def run(self) -> Outcome:
        """Until all steps are done or ``stopping``; however it ends, the last good state is checkpointed.

        Raises TrainingFailedError, CheckpointError, EndpointError, or what the backend raised.
        """
        if self._counters.step:
            self._source.checkpointed(self._counters.step)
        try:
            while self._counters.step < self._total_steps and not self._stopping():
                lease = self._source.next_batch()
                if lease is None or not self._take(lease):
                    break
        except (TrainingFailedError, CheckpointError):
            raise  # saved already, or cannot be
        except Exception as error:
            self._rescue(error)
            raise
        finished = self._counters.step >= self._total_steps
        self._recorders.progress.finishing(self._counters.step, "writing the last checkpoint")
        checkpoint = self._save()
        return Outcome(
            finished=finished,
            checkpoint=checkpoint,
            reward_first5=fmean(self._rewards[:_ENDS]) if self._rewards else None,
            reward_last5=fmean(self._rewards[-_ENDS:]) if self._rewards else None,
            preview=self._preview() if finished else None,
            overlong_sequences=self._overlong,
            missing_logprobs=self._missing,
            malformed_groups=self._malformed,
        )

    def _take(self, lease: Lease) -> bool:
        """One step. False if it was abandoned because of a stop; the batch then stays unacknowledged."""
        batch = build_batch(lease.groups, self._config, self._backend.vocabulary_size)
        self._note(batch)
        version_before = self._backend.policy_version
        learning_rate = self._learning_rate()
        step, size = self._counters.step + 1, f"{len(batch.data)} sequences"
        result: StepResult | None = None
        not_finite: NonFiniteError | None = None
        try:
            if batch.data:
                result = train_step(
                    self._backend,
                    batch.data,
                    self._loss,
                    AdamParams.of(self._config, learning_rate),
                    self._stopping,
                    lambda i, n: self._recorders.progress.say(step, "training", f"{size}, micro-batch {i} of {n}"),
                )
        except StepAbandonedError:
            return False
        except NonFiniteError as error:
            if self._config.on_non_finite == "stop":
                raise self._diverged(error) from error
            _log.warning("step %d was left out: loss or gradient is not finite (%s)", step, error)
            not_finite = error
        self._advance(result)
        self._record(batch, result, learning_rate if batch.data else None, version_before)
        self._source.acknowledge(lease)
        if self._counters.steps_without_signal >= self._config.max_steps_without_signal:
            raise self._no_signal(batch, not_finite)
        interval = self._config.save_checkpoint_interval
        if interval and self._counters.step % interval == 0:
            self._save()
        return True

    def _note(self, batch: TrainingBatch) -> None:
        self._overlong += batch.overlong_sequences
        self._missing += batch.missing_logprobs
        self._malformed += len(batch.malformed)
        step, config = self._counters.step + 1, self._config
        for problem in batch.malformed:
            _log.warning("step %d: left out %s", step, problem)
        if batch.missing_logprobs:
            done = "left out" if config.missing_logprobs == "drop" else "taken as sampled by the current policy"
            _log.warning("step %d: %d tokens without logprob %s", step, batch.missing_logprobs, done)
        if batch.overlong_sequences:
            done = "cut" if config.overlong == "cut" else "left out"
            limit = config.max_token_trainer_length
            _log.warning(
                "step %d: %d sequences beyond max_token_trainer_length %d %s",
                step,
                batch.overlong_sequences,
                limit,
                done,
            )
        if batch.out_of_loss:
            _log.info("step %d: out of the loss, scores counted: %s", step, batch.reasons)
        if self._preview_prompt is None and batch.rollouts:
            first = batch.rollouts[0]
            self._preview_prompt = first.datum.tokens_T[: first.prompt_length].tolist()

    def _learning_rate(self) -> float:
        warmup = self._config.warmup_steps
        return self._config.learning_rate * min(1.0, (self._counters.optimizer_steps + 1) / max(1, warmup))

    def _advance(self, result: StepResult | None) -> None:
        counters = self._counters
        self._counters = Counters(
            step=counters.step + 1,
            optimizer_steps=counters.optimizer_steps + (result is not None),
            policy_version=self._backend.policy_version,
            steps_without_signal=0 if result else counters.steps_without_signal + 1,
        )

    def _record(
        self, batch: TrainingBatch, result: StepResult | None, learning_rate: float | None, version_before: int
    ) -> None:
        step, now, stats = self._counters.step, self._clock(), self._backend.stats
        values = finite(
            step_metrics(
                batch,
                result,
                learning_rate=learning_rate,
                version_before=version_before,
                adapter_max_abs=result.optim.adapter_max_abs if result else self._backend.adapter_max_abs(),
                times=StepTimes.between(now - self._step_began, self._stats, stats),
                eval_percent_correct=self._recorders.evaluation.read(),
            )
        )
        self._step_began, self._stats, self._recorded = now, stats, True
        if (reward := values["reward/mean"]) is not None:
            self._rewards.append(reward)
        count = self._config.rollouts_logged_per_step
        self._recorders.rollouts.write(rollout_lines(step, batch.rollouts, self._backend, count))
        self._recorders.metrics.write([{"step": step, "time": utc_now(), **values}])
        self._recorders.also(step, values)
        _log.info(
            "step %d/%d: reward %s, loss %s, %s tokens trained",
            step,
            self._total_steps,
            _short(values["reward/mean"]),
            _short(values["train/loss"]),
            values["tokens/trained"],
        )

    def _preview(self) -> Preview | None:
        prompt = self._preview_prompt
        if not prompt or len(prompt) >= self._backend.context_length:
            return None
        self._recorders.progress.finishing(
            self._counters.step, "answering one prompt with the base and with the result"
        )
        try:
            before = self._backend.greedy(prompt, self._preview_tokens, adapter=False)
            after = self._backend.greedy(prompt, self._preview_tokens, adapter=True)
        except Exception:  # noqa: BLE001  a run that trained and saved everything does not fail for want of an example
            _log.exception("no preview")
            return None
        return Preview(
            prompt=self._backend.decode(prompt),
            before=self._backend.decode(before),
            after=self._backend.decode(after),
        )

    def _rescue(self, error: Exception) -> None:
        """A step that failed (out of memory, API gone) has not touched the weights: keep what was learned before it."""
        try:
            self._save()
        except CheckpointError as second:
            error.add_note(f"Besides: {second}")

    def _save(self) -> Path | None:
        if not self._counters.step:
            return None
        folder = self._checkpoints.save(self._counters)
        self._source.checkpointed(self._counters.step)
        return folder

    def _last_good(self) -> str:
        """The weights of the last step are good; they are kept before the run fails."""
        good = self._save()
        return f"The last good checkpoint is {good}." if good else "There is no checkpoint yet."

    def _diverged(self, error: NonFiniteError) -> TrainingFailedError:
        return TrainingFailedError(
            f"Step {self._counters.step + 1}: loss or gradient is not finite ({error}); the step was not taken. "
            f"{self._last_good()}",
            hint=_CALMER,
        )

    def _no_signal(self, batch: TrainingBatch, not_finite: NonFiniteError | None) -> TrainingFailedError:
        count = self._counters.steps_without_signal
        if not_finite is not None:
            cause = f"loss or gradient is not finite ({not_finite})"
            hint = _CALMER
        elif batch.unusable:
            cause = "no token came with the sampler's logprob"
            hint = (
                "Use server_type vllm or sglang: other types return text without logprobs. Or set missing_logprobs to "
                "recompute."
            )
        elif len(batch.malformed) == batch.groups:
            cause = f"no group was well formed ({batch.malformed[0]})"
            hint = (
                "Correct the environment: all lists of a sequence have its length, masks hold -100 or the token, and "
                "token ids come from the model's own tokenizer."
            )
        elif batch.zero_variance_groups + len(batch.malformed) < batch.groups and batch.out_of_loss:
            cause = f"what differed in score was out of the loss (sequences: {batch.reasons})"
            hint = (
                "Raise max_token_trainer_length, or set overlong to cut."
                if batch.out_of_loss.most_common(1)[0][0] == OVERLONG
                else "Give completions a longer max_token_length, or look into what the environment takes out."
            )
        else:
            rewards = [rollout.score for rollout in batch.rollouts]
            cause = f"all scores within every group were equal (last mean reward {fmean(rewards):.4g})"
            hint = (
                "Give the environment a reward that varies within a group: harder problems if all is right, easier "
                "ones if all is wrong, partial credit, a larger group_size or a longer max_token_length."
            )
        return TrainingFailedError(
            f"From {count} batches in a row nothing was learned: {cause}. {self._last_good()}", hint=hint
        )


def _short(value: object) -> str:
    """Four digits say enough in a log; metrics.jsonl has them all."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

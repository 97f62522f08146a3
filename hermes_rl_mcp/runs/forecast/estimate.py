"""What a run will take: memory, disk, time and tokens. Pure arithmetic over what is known; ``basis`` says what that is.

Best source first: an earlier run of the same model and environment here, a measurement of this machine, typical
figures. Memory and disk are formulas (``footprint``), corrected by how far they were off in the earlier run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hermes_rl_mcp.contracts.estimates import Estimate, Speed
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.runs.forecast import footprint
from hermes_rl_mcp.runs.forecast.earlier import Earlier
from hermes_rl_mcp.runs.forecast.footprint import Work
from hermes_rl_mcp.runs.forecast.modelfiles import ModelFiles

_SIGNAL_SHARE = 0.75
"""Of the groups that have different scores, and so are trained on."""
_PADDING = 1.1
_HEAD_FORWARD = 0.3
"""Of the work of the head in training, forward and backward."""
_STEP_OVERHEAD_S, _SEQUENCE_OVERHEAD_S = 0.05, 5e-4
"""HTTP, scoring and records."""
_STARTUP_S, _STARTUP_IMPORTS, _FIRST_STEP_IMPORTS = 3.0, 5.0, 0.7
"""Three processes start one after the other; the trainer's imports are some five times that of torch alone."""
_FETCH_BYTES_PER_S = 10e6
_LOAD_BYTES_PER_S = 400e6
_WRITE_BYTES_PER_S = 200e6
_MOSTLY_CUT = 0.5
"""Share of truncated answers above which a larger budget is taken to be used up as well."""


@dataclass(frozen=True)
class Measured:
    """How fast, and how that is known."""

    speed: Speed
    basis: str


def estimate(
    request: RunRequest, model: ModelFiles, work: Work, *, measured: Measured, earlier: Earlier | None
) -> Estimate:
    """``work`` is what the settings and the environment say; an earlier run knows the answers' lengths better."""
    if earlier is not None:
        return _from_earlier(request, model, work, earlier)
    step_s = _step_seconds(request, work, measured.speed)
    startup_s = _startup_seconds(model, measured.speed)
    checkpoints_s = _saving_seconds(request, model, work)
    evaluation_s = _evaluation_seconds(work, measured.speed)
    first_s = _FIRST_STEP_IMPORTS * measured.speed.import_s
    return Estimate(
        memory_bytes=footprint.memory_bytes(request, model.shape, work),
        gpu_memory_bytes=footprint.gpu_memory_bytes(request, model.shape, work),
        disk_bytes=footprint.disk_bytes(request, model.shape, work) + model.fetch_bytes,
        fetch_bytes=model.fetch_bytes,
        seconds_per_step=round(step_s, 3),
        startup_seconds=round(startup_s, 1),
        total_seconds=round(startup_s + first_s + work.steps * step_s + checkpoints_s + evaluation_s, 1),
        sampled_tokens=work.steps * work.sampled_tokens,
        basis=_with_guesses(measured.basis, model),
    )


def _step_seconds(request: RunRequest, work: Work, speed: Speed) -> float:
    trainer = request.trainer
    layers = speed.train_token_s + trainer.gradient_checkpointing * speed.prefill_token_s
    head = speed.head_token_s
    if trainer.kl_coef > 0:  # once more forward, without the adapter
        layers, head = layers + speed.prefill_token_s, head * (1 + _HEAD_FORWARD)
    training = _SIGNAL_SHARE * (_PADDING * work.trained_tokens * layers + work.sampled_tokens * head)
    sampling = _sampling_seconds(work, speed, work.batch, work.groups)
    return sampling + training + _STEP_OVERHEAD_S + work.batch * _SEQUENCE_OVERHEAD_S


def _sampling_seconds(work: Work, speed: Speed, answers: int, prompts: int) -> float:
    waves = -(-answers // work.rows)
    longest = work.longest if work.answer > work.longest / 2 else min(work.longest, 2.5 * work.answer)
    decoding = waves * longest * speed.pass_s + answers * work.answer * speed.row_s
    return decoding + prompts * work.prompt * speed.prefill_token_s


def _evaluation_seconds(work: Work, speed: Speed) -> float:
    """At the end of the run."""
    if not work.evaluated:
        return 0.0
    sampling = _sampling_seconds(work, speed, work.evaluated, work.evaluated)
    return sampling + work.evaluated * _SEQUENCE_OVERHEAD_S


def _startup_seconds(model: ModelFiles, speed: Speed) -> float:
    load = 2 * model.shape.parameters / _LOAD_BYTES_PER_S
    return _STARTUP_S + _STARTUP_IMPORTS * speed.import_s + load + model.fetch_bytes / _FETCH_BYTES_PER_S


def _saving_seconds(request: RunRequest, model: ModelFiles, work: Work) -> float:
    interval = request.trainer.save_checkpoint_interval
    count = 1 + (work.steps // interval if interval else 0)
    return count * footprint.checkpoint_bytes(model.shape, request.trainer.lora_rank) / _WRITE_BYTES_PER_S


def _from_earlier(request: RunRequest, model: ModelFiles, work: Work, earlier: Earlier) -> Estimate:
    pace, old = earlier.pace, footprint.work_of(earlier.request)
    old = replace(old, answer=pace.answer, prompt=work.prompt)
    work = replace(work, answer=_answer_now(work, old, pace.truncated))
    tokens = work.sampled_tokens / max(1, old.sampled_tokens)
    sequences = work.batch / old.batch
    per_step = _scaled(pace.step_s, pace.compute_s, tokens, sequences)
    mean = _scaled(pace.mean_step_s, pace.compute_s, tokens, sequences)
    record = earlier.record
    startup_s = record.startup_seconds
    if startup_s is None:
        startup_s = _STARTUP_S + _STARTUP_IMPORTS * 3.0
    startup_s += model.fetch_bytes / _FETCH_BYTES_PER_S
    same = abs(tokens - 1) < 0.01
    scaled = "" if same else f", scaled by {tokens:.2g} for the tokens of a step"
    evaluation_s = work.evaluated / max(1, old.batch) * pace.compute_s / 2 * tokens / max(sequences, 1e-9)
    return Estimate(
        memory_bytes=_memory(request, model, work, earlier, old),
        gpu_memory_bytes=footprint.gpu_memory_bytes(request, model.shape, work),
        disk_bytes=_disk(request, model, work, earlier, old) + model.fetch_bytes,
        fetch_bytes=model.fetch_bytes,
        seconds_per_step=round(per_step, 3),
        startup_seconds=round(startup_s, 1),
        total_seconds=round(
            startup_s + pace.first_extra_s + work.steps * mean + _saving_seconds(request, model, work) + evaluation_s, 1
        ),
        sampled_tokens=round(work.steps * pace.sampled_tokens * tokens),
        basis=f"run {record.run_id}: {earlier.steps} steps of this model and environment here{scaled}",
    )


def _answer_now(work: Work, old: Work, truncated: float) -> float:
    """An answer that was cut off grows with its budget; one that ended by itself does not."""
    if work.longest < old.longest or truncated > _MOSTLY_CUT:
        return max(1.0, min(old.answer * work.longest / old.longest, old.answer if truncated < _MOSTLY_CUT else 1e9))
    return old.answer


def _scaled(step_s: float, compute_s: float, tokens: float, sequences: float) -> float:
    compute_s = min(compute_s, step_s)
    return compute_s * tokens + (step_s - compute_s) * sequences


def _memory(request: RunRequest, model: ModelFiles, work: Work, earlier: Earlier, old: Work) -> int:
    now = footprint.memory_bytes(request, model.shape, work)
    peak = earlier.record.peak_memory_bytes
    if peak is None:
        return now
    return max(peak // 2, peak + now - footprint.memory_bytes(earlier.request, model.shape, old))


def _disk(request: RunRequest, model: ModelFiles, work: Work, earlier: Earlier, old: Work) -> int:
    now = footprint.disk_bytes(request, model.shape, work)
    taken = earlier.record.disk_bytes
    if taken is None or earlier.steps < old.steps:  # a run that was stopped has not reached its size
        return now
    return round(now * taken / footprint.disk_bytes(earlier.request, model.shape, old))


def _with_guesses(basis: str, model: ModelFiles) -> str:
    return f"{basis}; the model's shape is guessed from its name" if model.guessed else basis

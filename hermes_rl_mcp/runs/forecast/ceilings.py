"""What the operator allows one run to take, and what the machine has. Compares an estimate; starts and stops nothing.

Invariant: a run whose estimate is beyond a ceiling is refused with the estimate, the ceiling and a setting that fits.
"""

from __future__ import annotations

from collections.abc import Callable

from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.contracts.settings import OperatorLimits
from hermes_rl_mcp.errors import CeilingError, PreflightError
from hermes_rl_mcp.runs.forecast.device import Memory
from hermes_rl_mcp.runs.forecast.footprint import number

GIB = 2**30
_SMALLEST_MICRO_BATCH = 64

Again = Callable[[RunRequest], Estimate]
"""The estimate for changed settings."""


def check_limits(limits: OperatorLimits, request: RunRequest, estimate: Estimate, again: Again) -> None:
    """Raises CeilingError for the first of hours, disk and GPU memory that is beyond the operator's ceiling."""
    seconds = estimate.total_seconds
    if limits.max_hours is not None and seconds is not None and seconds > limits.max_hours * 3600:
        raise _beyond(
            "hours",
            f"{seconds / 3600:.3g} hours",
            seconds / 3600,
            limits.max_hours,
            "hours",
            _fewer_steps(request, estimate, again, limits.max_hours * 3600),
        )
    if limits.max_disk_gib is not None and estimate.disk_bytes > limits.max_disk_gib * GIB:
        fits = _less_disk(request, again, limits.max_disk_gib * GIB)
        raise _beyond(
            "disk",
            f"{_gib(estimate.disk_bytes)} GiB of disk",
            estimate.disk_bytes / GIB,
            limits.max_disk_gib,
            "GiB",
            fits,
        )
    gpu = estimate.gpu_memory_bytes
    if limits.max_gpu_memory_gib is not None and gpu is not None and gpu > limits.max_gpu_memory_gib * GIB:
        most = limits.max_gpu_memory_gib * GIB
        fits = _less_memory(request, again, lambda one: (one.gpu_memory_bytes or 0) <= most)
        raise _beyond("gpu_memory", f"{_gib(gpu)} GiB of GPU memory", gpu / GIB, limits.max_gpu_memory_gib, "GiB", fits)


def check_memory(
    request: RunRequest, estimate: Estimate, again: Again, *, host: Memory, gpu: Memory | None
) -> list[str]:
    """Raises PreflightError if this machine can never hold the run. Returns warnings if it cannot just now."""
    warnings = _against(request, estimate.memory_bytes, host, again, "memory", lambda one: one.memory_bytes)
    if gpu is not None and estimate.gpu_memory_bytes is not None:
        warnings += _against(
            request, estimate.gpu_memory_bytes, gpu, again, "GPU memory", lambda one: one.gpu_memory_bytes or 0
        )
    return warnings


def _against(
    request: RunRequest, needed: int, memory: Memory, again: Again, name: str, of: Callable[[Estimate], int]
) -> list[str]:
    if needed > memory.total:
        raise PreflightError(
            f"The run needs about {_gib(needed)} GiB of {name}; this machine has {_gib(memory.total)} GiB.",
            hint=_less_memory(request, again, lambda one: of(one) <= memory.total),
            details={"needed_bytes": needed, "total_bytes": memory.total},
        )
    if needed > memory.free:
        held = f" (held by {memory.holders})" if memory.holders else ""
        advice = _less_memory(request, again, lambda one: of(one) <= memory.free)
        return [
            f"About {_gib(needed)} GiB of {name} needed, {_gib(memory.free)} of {_gib(memory.total)} GiB free{held}. "
            f"{advice}"
        ]
    return []


def _beyond(name: str, needed: str, value: float, ceiling: float, unit: str, fits: str) -> CeilingError:
    return CeilingError(
        f"The run would take about {needed}; the operator allows {ceiling:g} {unit} (max_{name}).",
        hint=f"{fits} Only the person who starts the server can raise the ceiling.",
        details={"ceiling": f"max_{name}", "allowed": ceiling, "estimated": round(value, 3)},
    )


def _fewer_steps(request: RunRequest, estimate: Estimate, again: Again, allowed_s: float) -> str:
    done, total = request.resume_step or 0, number(request.env, "total_steps", 1)

    def seconds(steps: int) -> float:
        changed = request.model_copy(update={"env": {**request.env, "total_steps": done + steps}})
        return again(changed).total_seconds or 0.0

    fits, beyond = 0, max(1, total - done)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if seconds(middle) <= allowed_s else (fits, middle)
    if fits:
        return f"Set total_steps to {done + fits} or less, or lower batch_size or max_token_length."
    fixed_s = seconds(1) - (estimate.seconds_per_step or 0.0)
    if fixed_s >= allowed_s:
        return f"Starting and ending alone take about {fixed_s:.0f} s, whatever the settings."
    return "Not even one step fits: lower batch_size or max_token_length, or take a smaller model."


def _less_disk(request: RunRequest, again: Again, allowed: float) -> str:
    trainer = request.trainer
    most = trainer.keep_checkpoints or 1000
    for keep in sorted({most, *(n for n in (50, 20, 10, 5, 3, 2, 1) if n < most)}, reverse=True):
        changed = request.model_copy(update={"trainer": trainer.model_copy(update={"keep_checkpoints": keep})})
        if keep != trainer.keep_checkpoints and again(changed).disk_bytes <= allowed:
            return f"Set keep_checkpoints to {keep}."
    rank = trainer.lora_rank
    while rank > 1:
        rank //= 2
        update = {"keep_checkpoints": 1, "lora_rank": rank}
        if again(request.model_copy(update={"trainer": trainer.model_copy(update=update)})).disk_bytes <= allowed:
            return f"Set keep_checkpoints to 1 and lora_rank to {rank}."
    return "Lower total_steps, batch_size or max_token_length, or take a smaller model."


def _less_memory(request: RunRequest, again: Again, fits: Callable[[Estimate], bool]) -> str:
    trainer = request.trainer
    tokens, rows = trainer.micro_batch_tokens, trainer.sampler_max_rows
    while tokens > _SMALLEST_MICRO_BATCH or rows > 1:
        tokens, rows = max(_SMALLEST_MICRO_BATCH, tokens // 2), max(1, rows // 2)
        update = {"micro_batch_tokens": tokens, "sampler_max_rows": rows}
        if fits(again(request.model_copy(update={"trainer": trainer.model_copy(update=update)}))):
            return (
                f"Set micro_batch_tokens to {tokens} (now {trainer.micro_batch_tokens}) and sampler_max_rows to {rows} "
                f"(now {trainer.sampler_max_rows})."
            )
    return "Take a smaller model, or a machine with more memory."


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count >= 0.1 * GIB else f"{count / GIB:.2g}"

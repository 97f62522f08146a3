"""Memory that ran out: recognised however it is raised, and told with the settings that take less.

No torch here: its errors are known by their names and words.
"""

from __future__ import annotations

from typing import Literal

from hermes_rl_mcp.contracts.config import TrainerConfig
from trainer.failures import TrainingFailedError

Kind = Literal["gpu_oom", "host_oom"]
_GPU_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_HOST_WORDS = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "std::bad_alloc")
_MIN_TOKENS, _MIN_ROWS = 64, 1
_DEVICES: dict[Kind, str] = {"gpu_oom": "the GPU", "host_oom": "this machine"}


def kind(error: BaseException | None) -> Kind | None:
    """Which memory ran out; None if ``error`` and its causes are something else."""
    while error is not None:
        text = str(error)
        if type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _GPU_WORDS):
            return "gpu_oom"
        if isinstance(error, MemoryError) or any(words in text for words in _HOST_WORDS):
            return "host_oom"
        error = error.__cause__
    return None


def failure(
    which: Kind, error: BaseException, phase: str, settings: TrainerConfig, *, longest_answer: int, before: str = ""
) -> TrainingFailedError:
    """``phase`` is what the trainer was doing; ``before`` says how much memory there was when it began."""
    words = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    free = f" {before}" if before else ""
    return TrainingFailedError(
        f"{which}: {_DEVICES[which]} ran out of memory while {phase} ({words}).{free}",
        hint=_advice(phase, settings, longest_answer),
    )


def _advice(phase: str, settings: TrainerConfig, longest_answer: int) -> str:
    tokens, rows = settings.micro_batch_tokens, settings.sampler_max_rows
    changes: list[str] = []
    if "training" in phase and tokens > _MIN_TOKENS:
        changes.append(f"micro_batch_tokens {tokens} -> {max(_MIN_TOKENS, tokens // 2)}")
    if "sampling" in phase and rows > _MIN_ROWS:
        changes.append(f"sampler_max_rows {rows} -> {max(_MIN_ROWS, rows // 2)}")
    if ("training" in phase or "sampling" in phase) and longest_answer > 1:
        changes.append(f"max_token_length {longest_answer} -> {longest_answer // 2}")
    if changes:
        return f"Set with rl_edit_config: {', or '.join(changes)}; then start again, or resume from the checkpoint."
    return "The model itself does not fit: take a smaller one, or end other programs that use this memory."

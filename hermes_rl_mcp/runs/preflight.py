"""Checks before a run exists: what is certain to fail later fails now, with numbers, and nothing is started."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import MissingExtraError, PreflightError
from hermes_rl_mcp.files import make_private_dir
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.device import free_disk_bytes

_TRAIN_PACKAGES = ("torch", "transformers", "peft", "safetensors")
_BYTES_PER_PARAMETER = 12
"""Adapter and two Adam moments, fp32 each."""
_RESERVE_BYTES = 200 * 2**20
"""Logs, metrics, rollouts and the rollout journal of a run."""
_BUILTIN_PARAMETERS = {"builtin:tiny": 0.8e6, "builtin:smollm2-135m": 135e6}
_FALLBACK_PARAMETERS = 8e9
"""A model whose size is not in its name is taken to be as large as the largest that people train on one GPU."""
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z])")


def preflight(home: Home, request: RunRequest) -> None:
    """Raises MissingExtraError or PreflightError."""
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"Training (missing: {', '.join(missing)})", "train")
    if not Path(request.env_file).is_file():
        raise PreflightError(
            f"The environment file {request.env_file} is not there.", hint="Select the environment again."
        )
    for folder in (home.runs, home.logs):
        _check_writable(folder)
    _check_disk(home, request)


def checkpoint_bytes(model: str, lora_rank: int) -> int:
    """About how large one checkpoint is: LoRA on every linear layer of a decoder of this size."""
    parameters = _parameters(model)
    # Decoders have about 12 hidden^2 parameters per layer and one layer per 128 of hidden size, and LoRA adds
    # rank * 18.5 * hidden per layer (attention with grouped keys, gated MLP): 8e9 at rank 32 gives 88 million.
    hidden = (parameters * 128 / 12) ** (1 / 3)
    layers = max(1.0, hidden / 128)
    return int(lora_rank * 18.5 * hidden * layers * _BYTES_PER_PARAMETER)


def _check_writable(folder: Path) -> None:
    try:
        make_private_dir(folder)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be created: {error.strerror}.", hint="Set HERMES_HOME.") from error
    if not writable:
        raise PreflightError(f"{folder} is not writable.", hint="Fix its permissions or set HERMES_HOME.")


def _check_disk(home: Home, request: RunRequest) -> None:
    each = checkpoint_bytes(request.base_model, request.trainer.lora_rank)
    steps, interval = request.env.get("total_steps"), request.trainer.save_checkpoint_interval
    count = 1 + (steps // interval if interval and isinstance(steps, int) else 0)
    if keep := request.trainer.keep_checkpoints:
        count = min(count, keep + 1)  # an old one goes only once the new one is complete
    needed = each * count + _RESERVE_BYTES
    folder = Path(request.trainer.checkpoint_dir or home.runs)
    free = free_disk_bytes(folder)
    if needed > free:
        raise PreflightError(
            f"{folder} has {_gib(free)} GiB free; {count} checkpoints of about {_gib(each)} GiB (lora_rank "
            f"{request.trainer.lora_rank}) and logs need {_gib(needed)} GiB.",
            hint="Free some space, or use a lower lora_rank or a smaller keep_checkpoints.",
            details={"free_bytes": free, "needed_bytes": needed},
        )


def _parameters(model: str) -> float:
    if model in _BUILTIN_PARAMETERS:
        return _BUILTIN_PARAMETERS[model]
    if weights := [file.stat().st_size for file in Path(model).glob("*.safetensors")] if Path(model).is_dir() else []:
        return sum(weights) / 2  # bf16
    if found := _SIZE_IN_NAME.search(model.rsplit("/", 1)[-1]):
        return float(found[1]) * (1e9 if found[2] in "bB" else 1e6)
    return _FALLBACK_PARAMETERS


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f}"

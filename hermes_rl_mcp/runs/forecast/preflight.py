"""Checks before a run exists: what is certain to fail later fails now, with numbers, and nothing is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.errors import MissingExtraError, PreflightError
from hermes_rl_mcp.files import make_private_dir
from hermes_rl_mcp.paths import Home, claims_dir
from hermes_rl_mcp.runs.claims import secure_dir
from hermes_rl_mcp.runs.forecast import footprint
from hermes_rl_mcp.runs.forecast.device import free_disk_bytes
from hermes_rl_mcp.runs.forecast.modelfiles import locate

_TRAIN_PACKAGES = ("torch", "transformers", "peft", "safetensors")


def preflight(home: Home, request: RunRequest, environ: Mapping[str, str], *, dry: bool = False) -> None:
    """Raises MissingExtraError or PreflightError. With ``dry`` no folder is made."""
    missing = [name for name in _TRAIN_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"Training (missing: {', '.join(missing)})", "train")
    if not Path(request.env_file).is_file():
        raise PreflightError(
            f"The environment file {request.env_file} is not there.", hint="Select the environment again."
        )
    for folder in (home.runs, home.logs):
        _check_writable(folder, dry=dry)
    _check_claims(claims_dir(environ), dry=dry)
    _check_disk(home, request, environ)


def _check_writable(folder: Path, *, dry: bool) -> None:
    try:
        if dry:
            while not folder.exists():
                folder = folder.parent
        else:
            make_private_dir(folder)
        writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise PreflightError(f"{folder} cannot be created: {error.strerror}.", hint="Set HERMES_HOME.") from error
    if not writable:
        raise PreflightError(f"{folder} is not writable.", hint="Fix its permissions or set HERMES_HOME.")


def _check_claims(folder: Path, *, dry: bool) -> None:
    """Without it the supervisor cannot queue up for the device, and the run would fail at its first moment."""
    hint = "Set HERMES_RL_CLAIMS_DIR to a folder of your own on a local disk."
    try:
        if not dry or folder.exists():
            secure_dir(folder)
        while not folder.exists():
            folder = folder.parent
        usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise PreflightError(f"The claims folder {folder} cannot be used: {error.strerror}.", hint=hint) from error
    if not usable:
        raise PreflightError(f"The claims folder {folder} is not writable.", hint=hint)


def _check_disk(home: Home, request: RunRequest, environ: Mapping[str, str]) -> None:
    model = locate(request.base_model, request.model_path, environ)
    work = footprint.work_of(request)
    rank = request.trainer.lora_rank
    count, each = footprint.checkpoints_kept(request, work.steps), footprint.checkpoint_bytes(model.shape, rank)
    # While one of the kept is replaced, both are there.
    needed = footprint.disk_bytes(request, model.shape, work) + each + model.fetch_bytes
    folder = Path(request.trainer.checkpoint_dir or home.runs)
    free = free_disk_bytes(folder)
    if needed > free:
        fetched = f", the model ({_size(model.fetch_bytes)})" if model.fetch_bytes else ""
        raise PreflightError(
            f"{folder} has {_size(free)} free; {count} checkpoints of about {_size(each)} (lora_rank {rank})"
            f"{fetched} and logs need {_size(needed)}.",
            hint="Free some space, or use a lower lora_rank or a smaller keep_checkpoints.",
            details={"free_bytes": free, "needed_bytes": needed},
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"

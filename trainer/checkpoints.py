"""Checkpoints: adapter, optimizer, random state and counters in one folder per step.

Invariant: a folder ``step_N`` either holds a whole checkpoint, with ``complete.json`` written last, or does not exist:
everything is written and synced under a temporary name first. A failed write leaves the earlier ones untouched.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path

from pydantic import BaseModel
from safetensors import SafetensorError

from hermes_rl_mcp.checkpoints import ADAPTER, MARKER, Checkpoint, complete, last_complete, read_marker
from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.errors import ResumeError
from trainer.backends.base import Backend
from trainer.failures import CheckpointError
from trainer.metrics import utc_now

COUNTERS = "counters.json"
_TEMPORARY = ".writing-"


class Counters(BaseModel):
    """Where the loop stood."""

    step: int
    optimizer_steps: int
    policy_version: int
    steps_without_signal: int


class Checkpoints:
    """Writer of one folder of checkpoints."""

    def __init__(self, folder: Path, backend: Backend, *, base_model: str, lora_rank: int, keep: int = 0) -> None:
        """``keep``: how many of the newest stay; 0 = all."""
        self._folder = folder
        self._keep = keep
        self._backend = backend
        self._base_model = base_model
        self._lora_rank = lora_rank

    def save(self, counters: Counters) -> Path:
        """The folder of the checkpoint. Raises CheckpointError, naming the last good one."""
        target = self._folder / f"step_{counters.step}"
        if read_marker(target) is not None:
            return target
        temporary = self._folder / f"{_TEMPORARY}step_{counters.step}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers(target)
            (temporary / ADAPTER).mkdir(parents=True)
            self._write(temporary, counters)
            os.rename(temporary, target)
            _sync(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._failure(counters.step, error) from error
        self._prune()
        return target

    def last_good(self) -> Path | None:
        return last_complete(self._folder)

    def restore(self, checkpoint: Checkpoint) -> Counters:
        """Put an inspected checkpoint back into the backend. Raises ResumeError if it is of other base weights."""
        checkpoint.require_base(self._backend.base_sha256)
        folder = checkpoint.folder
        counters = Counters.model_validate_json((folder / COUNTERS).read_text())
        if counters.step != checkpoint.step:
            raise ResumeError(f"The checkpoint {folder} contradicts itself: {COUNTERS} says step {counters.step}.")
        self._backend.load(folder / ADAPTER, folder, counters.policy_version)
        return counters

    def _prune(self) -> None:
        """Only once the new one is complete; what cannot be removed is left for the next time."""
        for path, _ in complete(self._folder)[: -self._keep] if self._keep else []:
            _unmark(path)
            shutil.rmtree(path, ignore_errors=True)

    def _clear_leftovers(self, target: Path) -> None:
        """Of a writer that died, and a folder of this name that is not complete, whatever its marker says."""
        for leftover in [*self._folder.glob(f"{_TEMPORARY}*"), target]:
            if leftover.exists():
                _unmark(leftover)
                shutil.rmtree(leftover)

    def _write(self, folder: Path, counters: Counters) -> None:
        metadata = {
            "base_model": self._base_model,
            "base_sha256": self._backend.base_sha256,
            "policy_version": str(counters.policy_version),
            "step": str(counters.step),
        }
        self._backend.export(folder / ADAPTER, metadata)
        self._backend.save(folder)
        (folder / COUNTERS).write_text(counters.model_dump_json(indent=1) + "\n")
        files = {str(path.relative_to(folder)): _sync(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        marker = CheckpointMarker(
            step=counters.step,
            policy_version=counters.policy_version,
            base_model=self._base_model,
            base_sha256=self._backend.base_sha256,
            lora_rank=self._lora_rank,
            files=files,
            created_at=utc_now(),
        )
        (folder / MARKER).write_text(marker.model_dump_json(indent=1) + "\n")
        _sync(folder / MARKER)
        _sync(folder / ADAPTER)
        _sync(folder)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        good = self.last_good()
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "StorageFull" in str(error)
        reason = "the disk is full" if full else str(error)
        kept = f"The last good checkpoint is {good}." if good else "There is no earlier checkpoint."
        return CheckpointError(
            f"The checkpoint of step {step} could not be written to {self._folder}: {reason}. {kept}",
            hint="Free some space or point HERMES_HOME to a larger disk, then start again.",
        )


def _unmark(folder: Path) -> None:
    """First of all: without its marker a half-removed folder is no checkpoint."""
    (folder / MARKER).unlink(missing_ok=True)


def _sync(path: Path) -> str:
    """fsync a file or folder. Returns a file's SHA-256, '' for a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_dir():
            return ""
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    finally:
        os.close(descriptor)

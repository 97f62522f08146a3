"""What an ended run leaves to go on from, and how it gets into the directory of the run that goes on.

Invariant: the old run's directory is only read, and its record stays as it is. What is taken over is of one moment, the
checkpoint of step N: metrics up to N, the batches trained after N and those that waited (the rollout journal), and the
environment's position behind all of these.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.checkpoints import Checkpoint, inspect, newest
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import RunRecord, RunRequest
from hermes_rl_mcp.errors import PreflightError, ResumeError
from hermes_rl_mcp.files import make_private_dir, opened, private, read_file, write_atomic
from hermes_rl_mcp.paths import Home, RunPaths
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.process import is_alive, marked
from hermes_rl_mcp.runs.specs import marker
from hermes_rl_mcp.runs.store import RunStore

_ENV_POSITIONS = "env_checkpoints"
"""Below the checkpoints: ``<environment's label>/step-N.json``, as environments write them."""
_HEAD_BYTES = 200
"""The journal's first line names its kind; without it the rollout API would take the rest for torn and begin anew."""
_LOCK_S = 10.0
"""The supervisor of a run that has just ended lets go of it within moments."""
_BATCH_FIELDS = ("group_size", "batch_size")
"""With another value the batches of the old run are no batches of the new one."""


@dataclass(frozen=True)
class Source:
    """A run that has ended, and its newest checkpoint."""

    paths: RunPaths
    request: RunRequest
    checkpoint: Checkpoint

    @property
    def run_id(self) -> str:
        return self.paths.run_id

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def has_batches(self) -> bool:
        """Whether the batches after the checkpoint are still there."""
        try:
            with opened(self.paths.journal) as file:
                return b'"kind":"journal"' in file.readline(_HEAD_BYTES)
        except OSError:
            return False


def find_source(home: Home, run_id: str) -> Source:
    """Raises UnknownRunError, UnreadableRunError, or ResumeError if the run goes on or has no sound checkpoint."""
    store = RunStore(home)
    record = store.get(run_id)
    paths = store.paths(run_id)
    if not record.status.terminal:
        raise ResumeError(
            f"Run {run_id} has not ended (status: {record.status.value}); it cannot be continued by a second run.",
            hint="Call rl_stop_training, follow it with rl_check_status until it is stopped, then resume.",
            details={"run_id": run_id, "status": record.status.value},
        )
    if pids := _still_alive(paths, record):
        raise ResumeError(
            f"Run {run_id} has ended, but processes of it are alive and may still write: {pids}.",
            hint="End these processes, then resume.",
            details={"run_id": run_id, "leftover_pids": pids},
        )
    request = _request(paths)
    own = request.trainer.checkpoint_dir
    if own and Path(own).absolute() != paths.checkpoints.absolute():
        raise ResumeError(
            f"Run {run_id} kept its checkpoints in {own} (checkpoint_dir), outside of its own directory.",
            hint="Only runs with an empty checkpoint_dir can be continued. Start a new run.",
        )
    found = newest(paths.checkpoints)
    if found is None:
        raise ResumeError(
            f"Run {run_id} has no complete checkpoint to go on from.{_partial(paths)}",
            hint=f"Start a new run. This one wrote a checkpoint every {request.trainer.save_checkpoint_interval} steps "
            "(save_checkpoint_interval) and when it was stopped.",
        )
    try:
        return Source(paths, request, inspect(found))
    except OSError as error:
        raise ResumeError(
            f"The checkpoint {found} cannot be read: {error.strerror or error}.",
            hint="Check its permissions and its disk, or start a new run.",
        ) from error


def told(request: RunRequest) -> dict[str, JsonValue]:
    """What that run was told, by field name, without what was made for it alone."""
    label = f"{request.environment}-{request.run_id}"
    trainer = request.trainer.model_dump(mode="json", exclude_none=True)
    values: dict[str, JsonValue] = {
        **request.server_values,
        **trainer,
        **request.env,
        "model_name": request.base_model,
        "server_type": request.server_type,
    }
    own = {"wandb_name": label, "wandb_run_name": label, "tokenizer_name": request.model_path}
    return {name: value for name, value in values.items() if own.get(name) != value}


def continue_from(source: Source, request: RunRequest) -> RunRequest:
    """``request`` as one that continues ``source``. Raises ResumeError if it does not fit the checkpoint."""
    checkpoint, trainer = source.checkpoint, request.trainer
    checkpoint.require_fit(
        base_model=request.base_model,
        model_path=request.model_path,
        lora_rank=trainer.lora_rank,
        lora_alpha=trainer.lora_alpha,
    )
    if trainer.checkpoint_dir:
        raise ResumeError(
            f"checkpoint_dir is set to {trainer.checkpoint_dir}; a run that continues another keeps its checkpoints in "
            "its own directory.",
            hint='Set checkpoint_dir to "".',
            details={"field": "checkpoint_dir"},
        )
    total = request.env.get("total_steps")
    if not isinstance(total, int) or total <= source.step:
        raise ResumeError(
            f"Nothing is left to train: the checkpoint of run {source.run_id} is that of step {source.step}, and "
            f"total_steps is {total}.",
            hint=f"Raise total_steps above {source.step} (with environment '{request.environment}' selected), or take "
            "the adapter that rl_get_results names.",
            details={"field": "total_steps", "found": source.step, "wanted": total},
        )
    return request.model_copy(update={"resume_from": source.run_id, "resume_step": source.step})


def carry_over(source: Source, request: RunRequest, draft: RunPaths) -> None:
    """Fills a new run's directory. Raises ResumeError, or PreflightError if it cannot be copied."""
    try:
        lock = locks.share(source.paths.supervisor_lock, timeout_s=_LOCK_S)  # so that nobody deletes it meanwhile
        if lock is None:
            raise ResumeError(
                f"Run {source.run_id} is in use: its supervisor has not ended yet, or it is being deleted.",
                hint="Call rl_list_runs; if the run is still there, try again.",
            )
        try:
            _carry_over(source, request, draft)
        finally:
            lock.release()
    except OSError as error:
        raise PreflightError(
            f"The files of run {source.run_id} could not be copied: {error.strerror or error}.",
            hint="Free some disk space, or see whether the run is still there (rl_list_runs), then try again.",
        ) from error


def _carry_over(source: Source, request: RunRequest, draft: RunPaths) -> None:
    inspect(source.checkpoint.folder, copy_to=draft.checkpoints / source.checkpoint.folder.name)
    for path, copy in (
        (source.paths.metrics, draft.metrics),
        (source.paths.rollouts, draft.rollouts),
        (source.paths.env_metrics, draft.env_metrics),
    ):
        _copy_lines(path, copy, source.step)
    same_batches = source.has_batches and not _other_batches(source, request)
    if same_batches:
        _copy(source.paths.journal, draft.journal)
    _copy_positions(source, request, draft, newest_too=same_batches)


def warnings(source: Source, request: RunRequest) -> list[str]:
    """What does not prevent the run, but makes it another than the old one would have been."""
    found = []
    if source.request.env_sha256 != request.env_sha256:
        found.append(
            f"{request.env_file} has changed since run {source.run_id} was started; the new text is what runs now."
        )
    if other := _other_batches(source, request):
        found.append(
            f"{' and '.join(other)} differs from run {source.run_id}, so its batches cannot be used: those trained "
            f"after step {source.step} are not repeated, and those that waited are dropped."
        )
    elif not source.has_batches:
        found.append(
            f"The rollout journal of run {source.run_id} is gone or damaged: all batches after step {source.step} are "
            "new."
        )
    return found


def _other_batches(source: Source, request: RunRequest) -> list[str]:
    return [name for name in _BATCH_FIELDS if source.request.env.get(name) != request.env.get(name)]


def _still_alive(paths: RunPaths, record: RunRecord) -> list[int]:
    known = [process.identity for process in record.processes.values() if process.identity is not None]
    alive = {one.pid for one in known if is_alive(one)}
    try:
        config = RunConfig.model_validate(yaml.safe_load(read_file(paths.config)))
    except (OSError, yaml.YAMLError, ValidationError):
        return sorted(alive)
    return sorted(alive | {one.pid for one in marked(marker(config))})


def _request(paths: RunPaths) -> RunRequest:
    try:
        return RunRequest.model_validate_json(read_file(paths.request))
    except (OSError, ValidationError) as error:
        raise ResumeError(
            f"What run {paths.run_id} was asked to do cannot be read: {paths.request} ({type(error).__name__}).",
            hint="Start a new run.",
        ) from error


def _partial(paths: RunPaths) -> str:
    names = sorted(path.name for path in paths.checkpoints.glob("*step_*"))
    return f" Unfinished: {', '.join(names)}." if names else ""


def _copy(path: Path, copy: Path) -> None:
    with opened(path) as source, open(copy, "xb", opener=private) as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())


def _copy_lines(path: Path, copy: Path, last_step: int) -> None:
    """Whole lines of steps up to ``last_step``; the others will be written again."""
    if not path.exists():
        return
    with opened(path) as source, open(copy, "xb", opener=private) as target:
        for line in source:
            if line.endswith(b"\n") and (step := _step(line)) is not None and step <= last_step:
                target.write(line)


def _step(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _copy_positions(source: Source, request: RunRequest, draft: RunPaths, *, newest_too: bool) -> None:
    """Where the environment stood when the last batch that is taken over was made: its newest position if the journal
    comes along, else that at the checkpoint. It becomes the position of the checkpoint's step, under the new label."""
    labels = {_label(source.request): _label(request)}
    for folder in sorted((source.paths.checkpoints / _ENV_POSITIONS).glob("*")):
        steps = {int(path.stem[5:]): path for path in folder.glob("step-*.json") if path.stem[5:].isdecimal()}
        wanted = [step for step in steps if newest_too or step <= source.step]
        if not wanted:
            continue
        target = draft.checkpoints / _ENV_POSITIONS / labels.get(folder.name, folder.name)
        make_private_dir(target)
        write_atomic(target / f"step-{source.step}.json", _position(steps[max(wanted)]))


def _position(path: Path) -> str:
    """Its text. An environment that cannot read its position would end the new run at its first moment."""
    data = read_file(path)
    try:
        json.loads(data)
        return data.decode()
    except ValueError as error:
        raise ResumeError(
            f"The environment's position {path} is damaged ({type(error).__name__}).",
            hint="Remove this file: the environment then goes on from an earlier position, or from its start.",
        ) from error


def _label(request: RunRequest) -> str:
    """Of the environment, as config.yaml has it."""
    name = request.env.get("wandb_name")
    return str(name) if name else request.trainer.wandb_run_name or f"{request.environment}-{request.run_id}"


def changed(source: Source, values: Mapping[str, JsonValue]) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Fields whose value is another than in the old run: before and now."""
    before = told(source.request)
    return {name: (before[name], values[name]) for name in before if name in values and before[name] != values[name]}

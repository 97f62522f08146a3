"""Which weights a run has to give away: its checkpoint of one step, proven whole, and the base it belongs to. No torch.

Invariant: every byte of what is returned was compared with the checkpoint's marker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hermes_rl_mcp.checkpoints import ADAPTER, Checkpoint, complete, inspect, newest
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.errors import InvalidValueError, PreflightError, ResumeError
from hermes_rl_mcp.paths import RunPaths
from trainer.compose import read_config


@dataclass(frozen=True)
class RunWeights:
    """The adapter of one step."""

    paths: RunPaths
    config: RunConfig
    checkpoint: Checkpoint

    @property
    def run_id(self) -> str:
        return self.config.run.run_id

    @property
    def adapter(self) -> Path:
        """A PEFT folder."""
        return self.checkpoint.folder / ADAPTER

    @property
    def base_name(self) -> str:
        """As people may see it: a folder of this machine by its last part."""
        name = self.config.run.base_model
        return Path(name).name if Path(name).is_absolute() or name.startswith("~") else name


def find(run_dir: Path, step: int | None) -> RunWeights:
    """The checkpoint of ``step``, else the last one. Raises InvalidValueError or PreflightError."""
    paths = RunPaths(run_dir)
    config = read_config(paths.config)
    folder = Path(config.trainer.checkpoint_dir or paths.checkpoints)
    steps = [marked.marker.step for marked in complete(folder)]
    there = f"Its complete checkpoints are of step {', '.join(map(str, steps))}." if steps else ""
    found = newest(folder) if step is None else folder / f"step_{step}"
    if found is None:
        raise PreflightError(
            f"Run {config.run.run_id} has no checkpoint, so there are no trained weights.",
            hint="It writes one at save_checkpoint_interval, when it is stopped, and at its end.",
        )
    if not found.is_dir():
        raise InvalidValueError(f"Run {config.run.run_id} has no checkpoint of step {step}.", hint=there)
    try:
        checkpoint = inspect(found)
        run = config.run
        checkpoint.require_fit(
            base_model=run.base_model,
            model_path=run.model_path,
            lora_rank=config.trainer.lora_rank,
            lora_alpha=config.trainer.lora_alpha,
        )
    except ResumeError as error:
        raise PreflightError(
            f"The weights of step {found.name.removeprefix('step_')} cannot be used. {error.message}",
            hint=f"Choose another step. {there}",
        ) from error
    return RunWeights(paths, config, checkpoint)

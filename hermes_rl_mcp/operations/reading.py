"""One run as its files tell it now. Reads only; a figure that a file does not hold is None, never a guess."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import anyio
import yaml
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.contracts.diagnosis import Flag
from hermes_rl_mcp.contracts.estimates import Estimate
from hermes_rl_mcp.contracts.records import Evaluation, StepProgress, TrainerSummary, WandbState
from hermes_rl_mcp.contracts.runs import ChildReport, RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations import evaluation, findings
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import secret_values
from hermes_rl_mcp.runs.forecast.modelfiles import safetensors_problem
from hermes_rl_mcp.runs.receivers import receivers

_VITALS_OLD_S = 20.0
"""The supervisor looks every two seconds and may wait some for answers; what is older is no news of now."""


def known_secrets(context: Context, run_id: str) -> list[str]:
    """What must not be shown of a run: the operator's keys, and its nonce and path prefix, which are in addresses."""
    try:
        section = yaml.safe_load(read_file(context.home.run(run_id).config))["run"]
        own = [str(section[name]) for name in ("nonce", "path_prefix") if section.get(name)]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        own = []
    return [*secret_values(context.operator.environ), *own]


class RunReader:
    """A run's record, and what lies beside it."""

    def __init__(self, context: Context, record: RunRecord) -> None:
        self._context = context
        self.record = record

    @classmethod
    async def open(cls, context: Context, run_id: str) -> RunReader:
        """Raises UnknownRunError or UnreadableRunError. Off the event loop: a dead run may have to be closed first."""
        return cls(context, await anyio.to_thread.run_sync(context.runs.get, run_id))

    @property
    def _paths(self) -> RunPaths:
        return self._context.home.run(self.record.run_id)

    @property
    def status(self) -> str:
        return self.record.status.value

    def metrics(self) -> list[dict[str, JsonValue]]:
        """All steps, oldest first."""
        return self._context.runs.every(self._paths.metrics)

    def rollouts(self) -> list[dict[str, JsonValue]]:
        """The scored rollouts that the trainer kept, oldest first; text in them is untrusted."""
        return self._context.runs.every(self._paths.rollouts)

    def events(self) -> list[dict[str, JsonValue]]:
        """Changes of state, oldest first."""
        return self._context.runs.every(self._paths.events)

    def recent(self, count: int) -> list[dict[str, JsonValue]]:
        """The last steps, at most ``count``, oldest first."""
        return self._context.runs.recent(self.record.run_id, count)

    def flags(self) -> list[Flag]:
        """What is wrong with the run, worst first."""
        return findings.flags(self._context, self.record)

    def waiting(self) -> str:
        """Which process waits for what, as the supervisor saw it a moment ago; or that it looks no more."""
        seen = findings.vitals(self._context, self.record)
        if seen is None:
            return ""
        age_s = (self._context.now() - datetime.fromisoformat(seen.time)).total_seconds()
        if age_s < _VITALS_OLD_S or self.record.supervisor is None:
            was_starting = self.record.status is RunStatus.RUNNING and seen.running_seconds == 0
            return "" if was_starting else seen.waiting
        return (
            f"unknown for {age_s:.0f} s: the run's supervisor (pid {self.record.supervisor.pid}) does not look at its "
            "processes; it is stopped (kill -CONT wakes it), gets no CPU or cannot write"
        )

    def step(self) -> int | None:
        """Of the last line of metrics.jsonl."""
        step = (self._context.runs.latest(self.record.run_id) or {}).get("step")
        return step if isinstance(step, int) else None

    def doing(self) -> str:
        """What the run is doing now: the supervisor's words, the trainer's within a step that takes long, or how far
        the environment's evaluation at the end is."""
        if self.record.status is not RunStatus.RUNNING:
            return self.record.detail
        if progress := evaluation.progress(self._paths):
            return progress
        try:
            said = StepProgress.model_validate_json(read_file(self._paths.progress))
        except (OSError, ValidationError):
            return self.record.detail
        return said.text if said.step > (self.step() or 0) else self.record.detail

    def held_out(self) -> Evaluation | None:
        """Base against adapter on held-out items; None while it is not known, and for runs of a version without."""
        return evaluation.read(self._paths, self.record, self.request())

    def evaluation(self) -> float | None:
        """The environment's last ``eval/percent_correct``."""
        return self._context.runs.last_evaluation(self.record.run_id)

    def estimate(self) -> Estimate | None:
        """What was said before the start; None for runs of a version that said nothing."""
        request = self.request()
        return request.estimate if request else None

    def sends_to(self) -> list[str]:
        """Hosts outside of this machine that the run is told to send something to."""
        request = self.request()
        return receivers(request, self._context.operator.environ) if request else []

    def request(self) -> RunRequest | None:
        """What the launcher decided; None if that is gone or of a later version."""
        try:
            return RunRequest.model_validate_json(read_file(self._paths.request))
        except (OSError, ValidationError):
            return None

    def report(self) -> ChildReport | None:
        """The trainer's word on its own end."""
        return self._context.runs.report(self.record.run_id, "trainer")

    def trainer_summary(self) -> TrainerSummary | None:
        """What a trainer that completed its work summed up."""
        report = self.report()
        try:
            return TrainerSummary.model_validate(report.detail) if report and report.detail else None
        except ValidationError:
            return None  # of an older version; the metrics are there all the same

    def adapter_path(self, checkpoints: Sequence[str]) -> str | None:
        """The trainer's final adapter, else that of the newest complete checkpoint; only if it is there and whole."""
        summary = self.trainer_summary()
        named = [summary.adapter_path] if summary else []
        found = [str(Path(path, "adapter")) for path in reversed(checkpoints)]
        for path in [*named, *found]:
            folder = Path(path)
            weights = folder / "adapter_model.safetensors"
            if (folder / "adapter_config.json").is_file() and weights.is_file() and not safetensors_problem(weights):
                return str(folder)
        return None

    def wandb(self) -> tuple[str | None, str | None]:
        """(address, problem) of the optional W&B run."""
        try:
            state = WandbState.model_validate_json(read_file(self._paths.wandb_state))
        except (OSError, ValidationError):
            return None, None
        return state.url, state.error

    async def wait(self, timeout_s: float, *, for_steps: bool = True) -> None:
        """Until the record changes (with ``for_steps`` also until the next step), at most ``timeout_s``."""
        step = (self.step() or 0) if for_steps else sys.maxsize
        self.record = await self._context.runs.wait_change(self.record.run_id, self.record.revision, step, timeout_s)

"""How a run ended, judged from exit codes and the children's own reports. Reads files, changes nothing.

``completed`` needs the trainer's completion record and its exit 0 (or one that we forced after that record); every
other end of a process is a failure that names the first process to die and says why.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hermes_rl_mcp.checkpoints import newest
from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.runs import ChildReport, ProcessName, RunStatus
from hermes_rl_mcp.files import read_file, read_tail
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.redact import redact_text
from hermes_rl_mcp.runs.json_lines import json_object
from hermes_rl_mcp.runs.oom import OomKills

if TYPE_CHECKING:
    from hermes_rl_mcp.contracts.rollout_api import HealthReply

TITLES: dict[ProcessName, str] = {"api": "rollout API", "trainer": "trainer", "env": "environment"}
_TAIL_BYTES = 16_384
_LINE_BYTES = (2_048, 16_384, 262_144)
"""Of metrics; a line with many reward parts has some kilobytes."""
_LINE_CHARS = 400
_TRACEBACK = "Traceback (most recent call last):"
_TRACEBACK_CHARS = 1500
_MESSAGE_LINES = 8
"""An exception's message may have several lines."""


@dataclass(frozen=True)
class Verdict:
    """The end of a run. ``error`` is None for an end that was wanted."""

    status: RunStatus
    reason: str
    error: str | None = None
    hint: str | None = None


def read_report(paths: RunPaths, process: ProcessName) -> ChildReport | None:
    """What a child said of its own end; None if it said nothing that can be read."""
    try:
        return ChildReport.model_validate_json(read_file(paths.report(process)))
    except (OSError, ValidationError):
        return None


def tail(path: Path, max_bytes: int = _TAIL_BYTES) -> str:
    """The end of a file, or nothing: one that cannot be read hides neither its run nor other runs."""
    try:
        return read_tail(path, max_bytes)
    except OSError:
        return ""


def last_line(log: Path, secrets: Sequence[str] = ()) -> str:
    """The last line of a log, with secrets masked and then cut, for an error message."""
    lines = [line.strip() for line in tail(log).splitlines() if line.strip()]
    return redact_text(lines[-1], secrets)[:_LINE_CHARS] if lines else ""


def _last_words(log: Path, secrets: Sequence[str]) -> str:
    """The traceback with which the log ends, else its last line: data from a stranger, for an error message."""
    lines = tail(log).splitlines()
    begin = max((i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    if begin is not None:
        end = next((i for i in range(begin + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
        if len(lines) - end <= _MESSAGE_LINES:  # nothing else was said after it
            text = redact_text("\n".join(lines[begin:]), secrets)
            cut = text if len(text) <= _TRACEBACK_CHARS else f"{_TRACEBACK}\n  ...{text[-_TRACEBACK_CHARS:]}"
            return f" Its log ends with:\n{cut}"
    line = last_line(log, secrets)
    return f" Its last log line: {line}" if line else " Its log is empty."


def last_metric(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file."""
    for max_bytes in _LINE_BYTES:  # mostly the shortest end is enough
        for line in reversed(tail(path, max_bytes).splitlines()):
            if (found := json_object(line)) is not None:
                return found
    return None


def steps_done(paths: RunPaths) -> int:
    """Steps in the metrics file so far."""
    step = (last_metric(paths.metrics) or {}).get("step", 0)
    return step if isinstance(step, int) else 0


def covers_rest(rollouts: HealthReply | None, config: RunConfig) -> bool:
    """Whether the rollout API already holds all that the trainer still needs, so that the environment may go."""
    if rollouts is None:
        return False
    missing_steps = config.total_steps - rollouts.current_step - rollouts.batches_out
    return rollouts.queue_size * config.group_size >= missing_steps * config.batch_size


def ended_early(paths: RunPaths, config: RunConfig) -> Verdict:
    """The environment went, with exit 0, while the trainer still needs batches."""
    error = f"The environment ended at step {steps_done(paths)} of {config.total_steps}."
    return Verdict(
        RunStatus.FAILED,
        "environment ended early",
        error,
        "It must go on until it is told to stop; see the end of its log.",
    )


def failure(
    paths: RunPaths,
    process: ProcessName,
    exit_code: int,
    log: Path,
    *,
    oom_kills: OomKills,
    secrets: Sequence[str] = (),
) -> Verdict:
    """A process ended that should not have. ``oom_kills`` are those since the run began."""
    title = TITLES[process]
    report = read_report(paths, process)
    if report is not None and report.status == "failed" and report.error:
        return Verdict(RunStatus.FAILED, f"{title} failed", report.error, report.hint)
    said = _last_words(log, secrets)
    hint = f"See its log: {log}"
    if process == "trainer" and exit_code == 0:
        return Verdict(
            RunStatus.FAILED, "trainer exited without completing", f"The trainer exited without completing.{said}", hint
        )
    if exit_code == -signal.SIGKILL:
        seen = f"; {oom_kills.words}" if oom_kills.words else ""
        hint = f"Killed from outside{seen}. Host memory? Try a smaller model, batch_size or max_token_length."
    return Verdict(RunStatus.FAILED, f"{title} died", f"The {title} {exit_words(exit_code)}.{said}", hint)


def disk_full(folder: Path, what: str, checkpoint: Path | None) -> Verdict:
    """A run cannot go on without room for its results. ``what`` was seen of it."""
    kept = (
        f"The last complete checkpoint is intact: {checkpoint}."
        if checkpoint
        else "There was no complete checkpoint yet."
    )
    hint = "Free some space there, or set HERMES_HOME to a folder on a larger disk; then start again"
    return Verdict(
        RunStatus.FAILED,
        "disk full",
        f"The disk is full: {folder}{'; ' if what else ''}{what}. {kept}",
        hint + (" with resume_from to go on from that checkpoint." if checkpoint else "."),
    )


def with_way_on(verdict: Verdict, paths: RunPaths) -> Verdict:
    """A failure that says how what was learned before it can be used."""
    if verdict.status is not RunStatus.FAILED or "resume_from" in (verdict.hint or "") or not newest(paths.checkpoints):
        return verdict
    way = f"rl_start_training(resume_from='{paths.run_id}') goes on from its last complete checkpoint."
    return replace(verdict, hint=f"{verdict.hint or ''} {way}".strip())


def because_disk_full(failed: Verdict, full: Verdict) -> Verdict:
    """``failed``, the end of a process, with its cause. A child that says it itself keeps its words."""
    if failed.error and "disk is full" in failed.error:
        return Verdict(failed.status, full.reason, failed.error, failed.hint)
    return Verdict(failed.status, full.reason, f"{full.error} {failed.error or ''}".strip(), full.hint)


def exit_words(exit_code: int) -> str:
    """``exited with code 3`` or ``was killed by signal 9 (SIGKILL)``."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"was killed by signal {-exit_code}"

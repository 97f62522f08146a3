"""What the evaluation at the end of a run found, read and put into words. A result that is not on disk is never made
up: only why there is none is told.
"""

from __future__ import annotations

from pydantic import ValidationError

from hermes_rl_mcp.contracts.records import ArmScore, Evaluation
from hermes_rl_mcp.contracts.runs import ProcessName, RunRecord, RunRequest, RunStatus
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs import outcome
from hermes_rl_mcp.runs.env_state import read_env_state


def read(paths: RunPaths, record: RunRecord, request: RunRequest | None) -> Evaluation | None:
    """None while it is not known: the run goes on, ended before its last step, or is of a version without."""
    try:
        found = Evaluation.model_validate_json(read_file(paths.evaluation))
    except (OSError, ValidationError):
        return _absent(paths, record, request)
    lost = _lost_words(record) if found.status == "failed" else ""
    return found.model_copy(update={"reason": f"{found.reason}; {lost}"}) if lost else found


def progress(paths: RunPaths) -> str:
    """How far it is; empty while there is none."""
    state = read_env_state(paths)
    return f"evaluating on held-out items, {state.evaluating}" if state is not None and state.evaluating else ""


def words(evaluation: Evaluation) -> str:
    """In one line: the verdict with what it rests on, or why there is none."""
    if evaluation.base is None or evaluation.adapter is None:
        return f"{evaluation.status}: {evaluation.reason}"
    line = f"{evaluation.verdict}; {evaluation.measure} {_arm(evaluation.base)} by the base, "
    line += f"{_arm(evaluation.adapter)} by the adapter, on {evaluation.items} held-out items"
    if evaluation.repeats > 1:
        line += f", {evaluation.repeats} answers each"
    return f"{line}; {evaluation.left_out} pairs of answers left out" if evaluation.left_out else line


def _absent(paths: RunPaths, record: RunRecord, request: RunRequest | None) -> Evaluation | None:
    if record.status is not RunStatus.COMPLETED or request is None:
        return None
    if request.env_base == "atroposlib":
        return Evaluation(status="skipped", reason="an environment written for Atropos names no held-out items")
    report = outcome.read_report(paths, "trainer")
    if report is None or not report.stays_s:
        return None
    return Evaluation(status="failed", reason=_lost_words(record) or "the environment left no result")


def _lost_words(record: RunRecord) -> str:
    """Who went away while it went on, if somebody did."""
    names: tuple[ProcessName, ...] = ("trainer", "env")
    for name in names:
        process = record.processes[name]
        if process.exit_code and not process.forced:
            return f"the {outcome.TITLES[name]} {outcome.exit_words(process.exit_code)}"
    return ""


def _arm(score: ArmScore) -> str:
    return f"{score.accuracy:.2f} ({score.low:.2f} to {score.high:.2f})"

"""``hermes-rl export``: the weights of a run for other programs. The work needs torch, so a program of the trainer does
it; here is what a person asks for and is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from hermes_rl_mcp.checkpoints import newest
from hermes_rl_mcp.cli.programs import INTERRUPTED, started
from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.contracts.records import ExportRecord
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.paths import RunPaths

_RECORD = "export.json"


class Wanted(NamedTuple):
    """What was asked for."""

    kind: str
    """``adapter``, ``safetensors`` or ``gguf``."""
    output: str | None
    step: int | None
    dtype: str
    converter: str | None
    force: bool


class Done(NamedTuple):
    """The folder that was made, and its ``export.json``."""

    folder: Path
    record: ExportRecord


def run(at: Context, run_id: str, wanted: Wanted) -> Done | int:
    """The program's exit code if it failed; it has said why. Raises UnknownRunError."""
    paths = at.runs.paths(run_id)
    folder = Path(wanted.output or _default_name(paths, wanted)).expanduser().absolute()
    arguments = ["--run", str(paths.dir), "--output", str(folder), "--format", wanted.kind, "--dtype", wanted.dtype]
    arguments += ["--step", str(wanted.step)] if wanted.step is not None else []
    arguments += ["--converter", wanted.converter] if wanted.converter is not None else []
    arguments += ["--force"] if wanted.force else []
    with started(at, "trainer.export", arguments) as program:
        code = program.wait()
        if program.interrupted:
            return INTERRUPTED
    return code or Done(folder, ExportRecord.model_validate_json(read_file(folder / _RECORD)))


def show(console: Console, done: Done) -> None:
    record, check = done.record, done.record.check
    what = {"adapter": "adapter", "safetensors": "merged model", "gguf": "merged GGUF"}
    facts = {
        what[record.format]: str(done.folder),
        "of": f"run {record.run_id}, step {record.step}, on {record.base_model}, {record.dtype}",
        "checked": f"from disk, {check.tokens} tokens: logprobs as the trainer's to {check.error_mean:.2g} on average, "
        f"{check.error_max:.2g} at most (allowed {check.tolerance_mean:g}, {check.tolerance_max:g})",
        "learned": f"logprobs differ from the base model's by {check.moved_mean:.2g} on average, "
        f"{check.moved_max:.2g} at most"
        if check.adapter_max_abs
        else "nothing: the adapter is zero",
        "note": record.note,
        "next": "" if record.format == "gguf" else _next(done),
    }
    for name, text in facts.items():
        if text:
            console.print(Text.assemble((f"{name:<12} ", "bold"), printable(text)), soft_wrap=True)


def _next(done: Done) -> str:
    if done.record.format == "adapter":
        return f"hermes-rl serve {done.record.base_model} --adapter {done.folder}"
    return f"hermes-rl serve {done.folder}"


def _default_name(paths: RunPaths, wanted: Wanted) -> str:
    found = newest(paths.checkpoints)
    step = f"step_{wanted.step}" if wanted.step is not None else (found.name if found else "last")
    kind = {"adapter": "adapter", "safetensors": "merged", "gguf": "gguf"}[wanted.kind]
    return f"{paths.run_id}-{step.replace('_', '-')}-{kind}"

"""``python -P -m trainer.export --run RUN_DIR --output FOLDER``: write a run's weights for other programs, checked.

Invariant: the folder appears only once what is in it has been loaded again and found to be what was trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.records import Evaluation, ExportCheck, ExportRecord
from hermes_rl_mcp.errors import HermesRLError, PreflightError
from hermes_rl_mcp.files import read_file, read_tail, write_atomic
from hermes_rl_mcp.redact import redact_text, secret_values
from trainer import weights
from trainer.export import folder as folders
from trainer.export import gguf
from trainer.export.card import card
from trainer.metrics import utc_now
from trainer.process import prepare
from trainer.weights import RunWeights

if TYPE_CHECKING:
    import torch

    from trainer.export.check import Reference

_log = logging.getLogger(__name__)

_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PROBE = 'The quick brown fox jumps over the lazy dog. 12 + 30 = 42, and {"answer": [1, 2.5]} is JSON.\n'
_PROBE_ROLLOUTS = 3
_METRICS_BYTES = 64 * 2**20
_ROLLOUTS_BYTES = 2**20
_COPIES = 1.2
"""Of the weights in fp32 that are in memory at the most, with what merging and writing take besides."""


def main(arguments: list[str] | None = None) -> int:
    """0 once the folder is there, 1 with a sentence on standard error if it is not."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is no error to print a traceback of
    options = parse(arguments)
    environ = prepare()
    environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar for GGUF that no setting of its own turns off
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    lifeline.watch(environ)
    try:
        export(options)
    except HermesRLError as error:
        _log.error("Error: %s", error.message)
        if error.hint:
            _log.error("What to do: %s", error.hint)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description="Export the weights of a run.")
    parser.add_argument("--run", type=Path, required=True, help="a run's directory")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--step", type=int, default=None, help="its last checkpoint without it")
    parser.add_argument("--format", choices=["adapter", "safetensors", "gguf"], default="adapter")
    parser.add_argument("--dtype", choices=["auto", *_BYTES], default="auto", help="auto: as the base is stored")
    parser.add_argument("--converter", default=None, help="llama.cpp's converter or folder, for gguf")
    parser.add_argument("--torch-threads", type=int, default=0, help="0 = all cores")
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    return parser.parse_args(arguments)


def export(options: argparse.Namespace) -> None:
    """What ``parse`` gave. Raises HermesRLError, and nothing is left in the place of ``--output`` then."""
    target: Path = options.output.expanduser().absolute()
    folders.require_free(target, force=options.force)
    converter = gguf.find_converter(options.converter) if options.format == "gguf" else []
    found = weights.find(options.run, options.step)
    _say(f"run {found.run_id}, step {found.checkpoint.step}")
    base = _base(found)
    with folders.written_aside(target, force=options.force) as folder:
        if options.format == "adapter":
            folders.require_space(target, sum(path.stat().st_size for path in found.adapter.iterdir()))
            _write_adapter(found, base, options.torch_threads, folder)
        else:
            _write_model(found, base, options, converter, folder)


def _base(found: RunWeights) -> Path:
    """The base model's folder, which may have to be fetched. Its hash is compared when the adapter is put onto it."""
    from trainer.backends.local.model import fetch
    from trainer.models.materialise import materialise

    run = found.config.run
    base = fetch(materialise(run.base_model, run.model_path, _say), _say)
    _, parameters = _stored(base)
    needed, free = int(_COPIES * 4 * parameters), psutil.virtual_memory().available
    if needed > free:
        raise PreflightError(
            f"Merging and checking take about {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free.",
            hint="End other programs, or export on a machine with more memory.",
        )
    return base


def _stored(base: Path) -> tuple[str, int]:
    from trainer.backends.local.base_hash import stored

    kind, parameters = stored(base)
    return _STORED.get(kind, "float32"), parameters


def _write_adapter(found: RunWeights, base: Path, threads: int, folder: Path) -> None:
    import torch

    from trainer.export import check, files

    trained = _reference(found, base, threads)
    files.write_adapter(found.adapter, found.base_name, folder)
    _say("checking it with stock peft")
    figures = check.check(trained, check.load_adapter(base, folder), check.load_tokenizer(base), torch.float32)
    _describe(found, "adapter", "float32", figures, folder)


def _write_model(
    found: RunWeights, base: Path, options: argparse.Namespace, converter: list[str], folder: Path
) -> None:
    from trainer.export.check import LostInRoundingError

    trained = _reference(found, base, options.torch_threads)
    wanted: str = options.dtype
    stored, _ = _stored(base)
    dtype, note = stored if wanted == "auto" else wanted, ""
    try:
        figures = _merge(found, base, trained, dtype, folder, 2 if converter else 1)
    except LostInRoundingError as error:
        if wanted != "auto":
            raise
        dtype, note = "float32", f"It is in float32, for {stored}, the base model's type, is too coarse for it."
        _say(f"{error.message} So it is written in float32")
        figures = _merge(found, base, trained, dtype, folder, 2 if converter else 1)
    if converter:
        figures, more = _convert(found, converter, dtype, trained, figures, folder)
        note = f"{note} {more}".strip()
    _describe(found, "gguf" if converter else "safetensors", dtype, figures, folder, note)


def _reference(found: RunWeights, base: Path, threads: int) -> Reference:
    from trainer.export import check

    trained = check.reference(base, found.adapter, _probes(found), threads, _say)
    found.checkpoint.require_base(trained.base_sha256)
    return trained


def _merge(found: RunWeights, base: Path, trained: Reference, dtype: str, folder: Path, copies: int) -> ExportCheck:
    import torch

    from trainer.export import check, files

    folders.require_space(folder, copies * _stored(base)[1] * _BYTES[dtype])
    for path in folder.iterdir():  # of another type
        path.unlink()
    precision: torch.dtype = getattr(torch, dtype)
    files.write_merged(base, found.adapter, precision, folder, _say)
    _say("checking it with stock transformers")
    return check.check(trained, check.load_merged(folder), check.load_tokenizer(folder), precision)


def _convert(
    found: RunWeights, converter: list[str], dtype: str, trained: Reference, merged: ExportCheck, folder: Path
) -> tuple[ExportCheck, str]:
    """Leaves the GGUF file alone. Its own figures; those of the merged weights and a note if it cannot be read."""
    import torch

    from trainer.export import check

    _say(f"converting to GGUF with {Path(converter[-1]).name}")
    out = folder / _gguf_name(found)
    gguf.convert(converter, folder, out, dtype)
    tokenizer = check.load_tokenizer(folder)
    for path in folder.iterdir():
        if path != out:
            path.unlink()
    _say("checking the GGUF file")
    try:
        model = check.load_gguf(out)
    except (ValueError, NotImplementedError, KeyError, ImportError) as error:
        reason = f"The GGUF file could not be read back ({type(error).__name__})"
        return merged, f"{reason}; the figures are those of the merged weights that it was made from."
    return check.check(trained, model, tokenizer, getattr(torch, dtype)), ""


def _gguf_name(found: RunWeights) -> str:
    return f"{found.run_id}-step-{found.checkpoint.step}.gguf"


def _describe(found: RunWeights, kind: str, dtype: str, figures: ExportCheck, folder: Path, note: str = "") -> None:
    marker = found.checkpoint.marker
    record = ExportRecord.model_validate(
        {
            "run_id": found.run_id,
            "step": marker.step,
            "policy_version": marker.policy_version,
            "format": kind,
            "dtype": dtype,
            "base_model": found.base_name,
            "base_sha256": marker.base_sha256,
            "created_at": utc_now(),
            "check": figures,
            "note": note,
            "files": {},
        }
    )
    text = card(record, found.config, _steps(found), _evaluation(found), _gguf_name(found))
    (folder / folders.CARD).write_text(redact_text(text, secret_values(os.environ)), encoding="utf-8")
    record = record.model_copy(update={"files": folders.digests(folder)})
    write_atomic(folder / folders.RECORD, record.model_dump_json(indent=1) + "\n")


def _probes(found: RunWeights) -> list[str]:
    """A fixed text, and what the run itself sampled last: there the adapter shows."""
    lines = _lines(read_tail(found.paths.rollouts, _ROLLOUTS_BYTES))[-_PROBE_ROLLOUTS:]
    return [_PROBE, *(f"{line.get('prompt', '')}{line.get('completion', '')}" for line in lines)]


def _steps(found: RunWeights) -> list[dict[str, Any]]:
    lines = _lines(read_tail(found.paths.metrics, _METRICS_BYTES))
    return [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= found.checkpoint.step]


def _lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                found.append(value)
    return found


def _evaluation(found: RunWeights) -> Evaluation | None:
    try:
        return Evaluation.model_validate_json(read_file(found.paths.evaluation))
    except (OSError, ValidationError):
        return None


def _say(what: str) -> None:
    _log.info("... %s", what)


if __name__ == "__main__":
    sys.exit(main())

"""Runs llama.cpp's own converter on a merged model: its format, its names and its tokenizers change with its releases.

Invariant: what is run is what the person gave or has on PATH; nothing is fetched.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hermes_rl_mcp.contracts.exports import CONVERTERS
from hermes_rl_mcp.errors import InvalidValueError, PreflightError

_SCRIPT = "convert_hf_to_gguf.py"
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_INSTALL = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp), install what its converter needs "
    "(pip install gguf sentencepiece), and give its folder: --converter /path/to/llama.cpp"
)


def find_converter(given: str | None) -> list[str]:
    """The command. ``given``: the script, a program, or a llama.cpp folder. Raises InvalidValueError or
    PreflightError."""
    if given is None:
        for name in CONVERTERS:
            if found := shutil.which(name):
                return [found]  # by its own first line: it may belong to another Python
        raise PreflightError(f"GGUF needs llama.cpp's converter, and there is no {_SCRIPT} on PATH.", hint=_INSTALL)
    path = Path(given).expanduser()
    path = path / _SCRIPT if path.is_dir() else path
    if path.is_file():
        return [sys.executable, str(path)] if path.suffix == ".py" else [str(path.absolute())]
    raise InvalidValueError(f"--converter: there is no file {path}.", hint=_INSTALL)


def convert(command: list[str], merged: Path, out: Path, dtype: str) -> None:
    """Raises PreflightError with the converter's last words."""
    arguments = [*command, str(merged), "--outfile", str(out), "--outtype", _TYPES[dtype]]
    try:
        ended = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except OSError as error:
        raise PreflightError(f"The converter {command[-1]} cannot be run: {error.strerror}.", hint=_INSTALL) from error
    if ended.returncode != 0 or not out.is_file():
        words = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.strip()]
        last = " | ".join(words[-3:]) or "it said nothing"
        raise PreflightError(
            f"The converter {command[-1]} failed with exit code {ended.returncode}: {last}",
            hint="Try --format safetensors, and the converter by hand on that folder; or a newer llama.cpp.",
        )

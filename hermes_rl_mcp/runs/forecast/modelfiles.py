"""Where a model's files are, what its size and shape are, and whether they are whole. Loads nothing, asks nobody.

Invariant: a file that is there but cannot be a model (empty, cut short, a link into nothing) is never taken for one;
it is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl_mcp.contracts.estimates import Shape
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import install_root

TINY, SMOLLM2 = "builtin:tiny", "builtin:smollm2-135m"
SMOLLM2_SHAPE = Shape(
    hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152, tied=True
)
_MARKER = "hermes_rl_source.json"
"""Written last by whoever materialised a builtin model."""
_FALLBACK_PARAMETERS = 8e9
"""A model whose size is not in its name is taken to be as large as the largest that people train on one GPU."""
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9])(\d+(?:\.\d+)?)([bBmM])(?![A-Za-z])")
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class ModelFiles:
    """A model as far as it is known before it is loaded."""

    folder: Path | None
    """Where its files are; None = they have yet to be fetched."""
    shape: Shape
    guessed: bool
    """The shape is a guess from the model's name."""
    fetch_bytes: int = 0


def locate(name: str, model_path: str, environ: Mapping[str, str]) -> ModelFiles:
    """What the disk says of a model. Raises nothing: a damaged folder is judged by ``check_folder``."""
    if name == TINY:
        folder = install_root() / "trainer" / "models" / "tiny"  # copied from there by the trainer
        return _described(folder, name)
    if name == SMOLLM2:
        there = (Path(model_path) / _MARKER).is_file()
        fetch = 0 if there else weight_bytes(SMOLLM2_SHAPE)
        return ModelFiles(Path(model_path) if there else None, SMOLLM2_SHAPE, False, fetch)
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return _described(folder, name)
    if snapshot := hub_snapshot(model_path, environ):
        return _described(snapshot, name)
    shape = shape_from_name(name)
    return ModelFiles(None, shape, True, weight_bytes(shape))


def check_folder(folder: Path, name: str) -> None:
    """Raises PreflightError with the file's name unless config and weights are whole."""
    config = folder / "config.json"
    if not config.exists():
        raise _broken(name, config, "is missing", "Save the model again with save_pretrained, or give another folder.")
    if not isinstance(read_config(folder), dict):
        raise _broken(name, config, "is no JSON object", "Write or download this file again.")
    for file in weight_files(folder, name):
        if problem := safetensors_problem(file):
            raise _broken(name, file, problem, _again(file))


def weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors that make up the model. Raises PreflightError if there are none or one that is listed is gone."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise _broken(name, index, f"cannot be read ({error})", _again(index)) from error
        return [folder / one for one in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise PreflightError(
            f"The model '{name}' has no *.safetensors file in {folder}; other weight formats can run code and are not "
            "loaded.",
            hint="Save the model again with save_pretrained, which writes safetensors, or choose another.",
            details={"field": "model_name", "path": str(folder)},
        )
    return found


def safetensors_problem(file: Path) -> str | None:
    """Why ``file`` cannot be whole, judged by its header and its length."""
    try:
        size = file.stat().st_size
        if size == 0:
            return "is empty (0 bytes): a download that broke off"
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_MAX_HEADER_BYTES, max(0, size - 8)):
                return "is cut short or no safetensors file: its header is longer than the file"
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        return "is missing (or a link to a file that is gone)"
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"cannot be read as safetensors ({error})"
    return f"is cut short: {size} of {needed} bytes" if size < needed else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The Hub client's cache, where its own variables put it."""
    if cache := environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    return hub_home(environ) / "hub"


def hub_home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser()
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(base).expanduser() / "huggingface"


def hub_snapshot(model: str, environ: Mapping[str, str]) -> Path | None:
    """The cached files of a Hub id's main branch, whole or not; None if nothing of it is there."""
    repository = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and "/" not in commit and snapshot.is_dir() else None


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.json``; None if there is none or it cannot be read."""
    try:
        with (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def shape_from_config(config: Mapping[str, Any]) -> Shape | None:
    """From a transformers configuration, whatever the family calls its fields; None if it does not say enough."""
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else dict(config)

    def number(*names: str) -> int | None:
        found = (values.get(name) for name in names)
        return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    hidden = number("hidden_size", "n_embd", "d_model")
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    heads = number("num_attention_heads", "n_head")
    vocabulary = number("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    return Shape(
        hidden=hidden,
        intermediate=number("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or max(1, hidden // heads),
        vocabulary=vocabulary,
        tied=values.get("tie_word_embeddings", True) is not False,
    )


def shape_from_name(name: str) -> Shape:
    """``Qwen/Qwen3-8B``: a decoder of 8 billion parameters with the usual proportions."""
    found = _SIZE_IN_NAME.search(name.rsplit("/", 1)[-1])
    parameters = float(found[1]) * (1e9 if found[2] in "bB" else 1e6) if found else _FALLBACK_PARAMETERS
    # Decoders have about 12 hidden^2 parameters per layer and one layer per 128 of hidden size.
    hidden = max(64, 64 * round((parameters * 128 / 12) ** (1 / 3) / 64))
    heads = max(1, hidden // 64)
    return Shape(
        hidden=hidden,
        intermediate=3 * hidden,
        layers=max(1, round(hidden / 128)),
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=64,
        vocabulary=49_152 if parameters < 1e9 else 151_936,
        tied=parameters < 4e9,
    )


def weight_bytes(shape: Shape) -> int:
    """Of the files: bf16."""
    return 2 * shape.parameters


def _described(folder: Path, name: str) -> ModelFiles:
    shape = shape_from_config(read_config(folder) or {})
    return ModelFiles(folder, shape or shape_from_name(name), shape is None)


def _again(file: Path) -> str:
    return f"Remove {file} (and the file it links to) and download it again; nothing of it is used as it is."


def _broken(name: str, file: Path, problem: str, hint: str) -> PreflightError:
    return PreflightError(
        f"The model '{name}' cannot be loaded: {file} {problem}.",
        hint=hint,
        details={"field": "model_name", "path": str(file)},
    )

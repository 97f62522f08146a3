"""Write and check PEFT adapter folders.

Invariant: an adapter names the hash of the base it was trained on, and is never loaded onto another one. The same
weights and notes give the same bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.files import read_file

WEIGHTS_FILE = "adapter_model.safetensors"
NOTES_FILE = "hermes_rl.json"


def save(peft: Any, folder: Path, metadata: dict[str, str]) -> None:
    """Weights and configuration as stock peft reads them, and our ``hermes_rl.json``."""
    state = get_peft_model_state_dict(peft, save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt", **metadata})
    sort_metadata(folder / WEIGHTS_FILE)
    config = peft.peft_config["default"]
    training, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = training
    (folder / NOTES_FILE).write_text(json.dumps(metadata, indent=1) + "\n")


def sort_metadata(path: Path) -> None:
    """The library writes the notes in another order each time. The header begins with its length in 8 bytes, and spaces
    at its end are part of it."""
    with path.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, object]] = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(text) == size  # the same entries, written as compactly
        file.seek(8)
        file.write(text)


def restore(peft: Any, folder: Path) -> None:
    """Put the saved weights into the live adapter."""
    set_peft_model_state_dict(peft, load_file(folder / WEIGHTS_FILE))


def _refused(folder: Path, why: str) -> PreflightError:
    return PreflightError(
        f"{folder} is not an adapter that can be loaded: {why}.",
        hint="Give the adapter folder that rl_get_results names.",
    )


def check_base(folder: Path, base_sha256: str) -> dict[str, str]:
    """What the adapter says of itself. Raises PreflightError if it belongs to another base or is no adapter."""
    if not (folder / "adapter_config.json").is_file():
        raise _refused(folder, "it has no adapter_config.json")
    try:
        config = json.loads(read_file(folder / "adapter_config.json"))
    except (OSError, ValueError) as error:
        raise _refused(folder, f"its adapter_config.json cannot be read ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _refused(folder, "its adapter_config.json is not that of a LoRA adapter")
    if config.get("auto_mapping"):
        raise _refused(folder, "its adapter_config.json names code (auto_mapping), and no code of an adapter is run")
    if not (folder / WEIGHTS_FILE).is_file():
        raise _refused(folder, f"it has no {WEIGHTS_FILE}; other formats can run code and are not loaded")
    try:
        notes: dict[str, str] = json.loads(read_file(folder / NOTES_FILE))
    except FileNotFoundError:
        return {}
    if notes.get("base_sha256") not in (None, base_sha256):
        raise PreflightError(
            f"The adapter in {folder} was trained on other base weights than the ones loaded.",
            hint=f"Load it onto {notes.get('base_model')} with the same weights (hash {notes['base_sha256'][:12]}).",
        )
    return notes

"""Writes the files of an export: the adapter, or base and adapter merged by stock peft, with what belongs to the base.

Invariant: nothing that names a place on this machine goes out: a folder is called by its last part.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from trainer.backends.local.adapter_files import NOTES_FILE, WEIGHTS_FILE, sort_metadata
from trainer.models.source import MARKER

_ADAPTER_CONFIG = "adapter_config.json"
_OF_THE_WEIGHTS = ("config.json", "model.safetensors.index.json", MARKER)
"""Written anew, or true of the base's files alone."""
_OF_THE_BASE = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
"""Tokenizer, chat template, generation configuration, licence: as they are, whatever wrote them."""
_SHARD = "5GB"


def write_merged(base: Path, adapter: Path, dtype: torch.dtype, folder: Path, progress: Callable[[str], None]) -> None:
    """W + (alpha / rank) B A in fp32, then rounded to ``dtype`` once."""
    progress("loading the base model")
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    progress("merging the adapter")
    merged: Any = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    progress("writing the merged weights")
    merged.to(dtype).save_pretrained(folder, max_shard_size=_SHARD)
    copy_base_files(base, folder)


def copy_base_files(base: Path, folder: Path) -> None:
    for pattern in _OF_THE_BASE:
        for path in base.glob(pattern):
            if path.is_file() and path.name not in _OF_THE_WEIGHTS:
                shutil.copyfile(path, folder / path.name)


def write_adapter(adapter: Path, base_name: str, folder: Path) -> None:
    """A copy that calls its base ``base_name``, wherever that lay."""
    config = json.loads((adapter / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_name
    (folder / _ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    notes = json.loads((adapter / NOTES_FILE).read_text(encoding="utf-8"))
    notes["base_model"] = base_name
    (folder / NOTES_FILE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
    with safe_open(adapter / WEIGHTS_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        metadata = {**file.metadata(), "base_model": base_name}
    save_file(tensors, folder / WEIGHTS_FILE, metadata=metadata)
    sort_metadata(folder / WEIGHTS_FILE)

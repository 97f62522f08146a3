"""SHA-256 over a model's safetensors weights, read straight from the files: names, types, shapes and bytes.

Invariant: the same tensors give the same hash however they are split over files.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

from hermes_rl_mcp.errors import PreflightError

_CHUNK = 1 << 24


class _Entry(BaseModel):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def weights_sha256(folder: Path) -> str:
    """Raises PreflightError when the folder has no safetensors file."""
    tensors: dict[str, tuple[Path, str, list[int], int, int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry, start in _entries(path):
            begin, end = entry.data_offsets
            tensors[name] = (path, entry.dtype, entry.shape, start + begin, start + end)
    if not tensors:
        raise PreflightError(
            f"No safetensors weights in {folder}.",
            hint="Only safetensors models are loaded; convert the model or choose another model_name.",
        )
    digest = hashlib.sha256()
    open_maps: dict[Path, mmap.mmap] = {}
    try:
        for name in sorted(tensors):
            path, dtype, shape, begin, end = tensors[name]
            if path not in open_maps:
                with path.open("rb") as file:
                    open_maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
            for offset in range(begin, end, _CHUNK):
                digest.update(open_maps[path][offset : min(offset + _CHUNK, end)])
    finally:
        for view in open_maps.values():
            view.close()
    return digest.hexdigest()


def stored(folder: Path) -> tuple[str, int]:
    """The type in which most of the weights are stored, as safetensors has it (``BF16``), and how many there are."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        for _, entry, _ in _entries(path):
            counts[entry.dtype] += math.prod(entry.shape)
    return counts.most_common(1)[0][0] if counts else "F32", counts.total()


def _entries(path: Path) -> list[tuple[str, _Entry, int]]:
    """Name, header entry and where the file's data begins. The first 8 bytes are the header's length."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return [(name, _Entry.model_validate(entry), 8 + size) for name, entry in header.items() if name != "__metadata__"]

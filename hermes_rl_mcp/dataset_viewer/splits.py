"""Which files of a folder are data, and to which split each belongs: by the words that everybody uses in their names.

Nothing leads out of the folder, hidden files are not looked at, and a folder of a million files ends the search early.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
"""By suffix."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}
"""Written beside data by libraries."""
_WORDS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "dev": "validation", "val": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_WORD = re.compile(r"(?<![a-z])(" + "|".join(sorted(_WORDS, key=len, reverse=True)) + r")(?![a-z])")
_DEPTH, _ENTRIES = 3, 2_000


def format_of(path: Path) -> str | None:
    """None for a file that is no data."""
    hidden = path.name.startswith(".") or path.name in _NOT_DATA
    return None if hidden else FORMATS.get(path.suffix.lower())


def splits_of(path: Path) -> dict[str, list[Path]]:
    """Split to its files, in order of their names; empty if there are none. A single file is one split."""
    if not path.is_dir():
        return {_split(path, path.parent) or "train": [path]} if format_of(path) else {}
    files = sorted(data_files(path))
    found: dict[str, list[Path]] = {}
    for file in files:
        name = _split(file, path) or ("train" if len(files) == 1 else file.stem)
        found.setdefault(name, []).append(file)
    order = {"train": 0, "validation": 1, "test": 2}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], 3), item[0])))


def data_files(folder: Path) -> Iterator[Path]:
    """At most _DEPTH folders deep, after at most _ENTRIES looks."""
    looks = 0
    for here, folders, names in os.walk(folder):
        level = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__"))) if level < _DEPTH else []
        for name in sorted(names):
            if (looks := looks + 1) > _ENTRIES:
                return
            if format_of(path := Path(here, name)) and path.is_file():
                yield path


def _split(file: Path, folder: Path) -> str | None:
    """By the file's name, else by the folders that it lies in."""
    for part in reversed(file.relative_to(folder).parts):
        if words := _WORD.findall(part.lower()):
            return _WORDS[words[-1]]
    return None

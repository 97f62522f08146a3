"""Where a materialised model came from, and the proof that its files are still the ones that were put there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

MARKER = "hermes_rl_source.json"
"""Beside the model's files; its presence says that the folder is ours to repair."""

Progress = Callable[[str], None]
"""Gets a short sentence each time something new begins or a long step got on."""


class Origin(BaseModel):
    """What a model was made from."""

    model_config = ConfigDict(extra="forbid")

    origin: str
    """In words, for people: a package and version, a Hub id and revision."""
    origin_sha256: str | None = None
    """Of the archive it was taken from, where there was one."""


class ModelSource(Origin):
    """``hermes_rl_source.json``. Written last: a folder that has it was complete when it was written."""

    name: str
    files: dict[str, str]
    """SHA-256 of every file, by name."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_folder(name: str, origin: Origin, folder: Path) -> ModelSource:
    """The record of a folder that was just filled."""
    files = {file.name: sha256_of(file) for file in sorted(folder.iterdir()) if file.is_file() and file.name != MARKER}
    return ModelSource(name=name, files=files, **origin.model_dump())


def write_source(source: ModelSource, folder: Path) -> None:
    (folder / MARKER).write_text(source.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_source(folder: Path) -> ModelSource | None:
    """The record in ``folder``; None if there is none or it cannot be read."""
    try:
        return ModelSource.model_validate_json((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None


def is_intact(folder: Path, name: str) -> bool:
    """Whether the folder holds model ``name`` with every file as it was written."""
    source = read_source(folder)
    if source is None or source.name != name:
        return False
    try:
        return all(sha256_of(folder / file) == digest for file, digest in source.files.items())
    except OSError:
        return False

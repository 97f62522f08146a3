"""Checkpoints as files: which folders are one, and whether one is whole, unaltered and of the run that wants it.

Invariant: what is not listed in a checkpoint's marker, does not match its hash there, or is anything but JSON and
safetensors is never read on. No torch: the launcher and the trainer look with the same eyes.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pydantic import ValidationError

from hermes_rl_mcp.contracts.records import CheckpointMarker
from hermes_rl_mcp.errors import ResumeError
from hermes_rl_mcp.files import NotAFileError, make_private_dir, opened, private, read_file

MARKER = "complete.json"
ADAPTER = "adapter"
ADAPTER_CONFIG = f"{ADAPTER}/adapter_config.json"
_SUFFIXES = (".json", ".safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_BUILTIN = "builtin:"
_BLOCK_BYTES = 1 << 20
_OTHER = "Only whole checkpoints that this program wrote are continued. Remove the folder to go on from an earlier one."


class Marked(NamedTuple):
    """A complete checkpoint: its folder holds the adapter."""

    path: Path
    marker: CheckpointMarker


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every file is what its writer left."""

    folder: Path
    marker: CheckpointMarker
    lora_alpha: float
    base_named: str
    """The base model as the adapter's own configuration has it."""

    @property
    def step(self) -> int:
        return self.marker.step

    def require_fit(self, *, base_model: str, model_path: str, lora_rank: int, lora_alpha: float) -> None:
        """Raises ResumeError that names what is in the checkpoint and what was wanted."""
        marker = self.marker
        self._require("the base model", marker.base_model, base_model, "model_name")
        self._require("lora_rank", marker.lora_rank, lora_rank, "lora_rank")
        self._require("lora_alpha", self.lora_alpha, lora_alpha, "lora_alpha")
        if not _names(self.base_named, base_model, model_path):
            raise ResumeError(
                f"The checkpoint {self.folder} is not to be trusted: its {ADAPTER_CONFIG} names the base model "
                f"'{self.base_named}', its marker '{marker.base_model}'.",
                hint=_OTHER,
            )

    def require_base(self, base_sha256: str) -> None:
        """The same for the weights themselves: a name says little about them."""
        if self.marker.base_sha256 != base_sha256:
            raise ResumeError(
                f"The checkpoint {self.folder} was trained on base weights with the hash "
                f"{self.marker.base_sha256[:12]}; the {self.marker.base_model} loaded here has {base_sha256[:12]}.",
                hint="Load the same weights, or start a new run.",
                details={"field": "model_name", "found": self.marker.base_sha256, "wanted": base_sha256},
            )

    def _require(self, what: str, found: float | str, wanted: float | str, name: str) -> None:
        if found != wanted:
            raise ResumeError(
                f"The checkpoint {self.folder} does not fit: {what} is {found!r} there and {wanted!r} in the "
                "configuration.",
                hint=f"Set {name} to {found!r}, or start a new run.",
                details={"field": name, "found": found, "wanted": wanted},
            )


def read_marker(folder: Path) -> CheckpointMarker | None:
    """None if the folder is no complete checkpoint: the marker is missing or damaged, or a file that it names is."""
    try:
        marker = CheckpointMarker.model_validate_json(read_file(folder / MARKER))
    except (OSError, ValidationError):
        return None
    return marker if all((folder / name).is_file() for name in marker.files) else None


def complete(folder: Path) -> list[Marked]:
    """Every complete checkpoint in a run's folder of checkpoints, by step. What is still being written is none."""
    found = [Marked(path, marker) for path in folder.glob("step_*") if (marker := read_marker(path)) is not None]
    return sorted(found, key=lambda one: one.marker.step)


def last_marked(folder: Path) -> Marked | None:
    """The complete checkpoint of the latest step; older ones are not looked at."""
    steps = {path: step for path in folder.glob("step_*") if (step := _step(path)) is not None}
    for path in sorted(steps, key=lambda path: steps[path], reverse=True):
        if (marker := read_marker(path)) is not None:
            return Marked(path, marker)
    return None


def last_complete(folder: Path) -> Path | None:
    """The folder of that checkpoint."""
    found = last_marked(folder)
    return found.path if found else None


def newest(folder: Path) -> Path | None:
    """The folder of the latest step that claims to be complete, for ``inspect`` to judge: a damaged checkpoint is
    not passed over silently for an older one."""
    found = [path for path in folder.glob("step_*") if _step(path) is not None and os.path.lexists(path / MARKER)]
    return max(found, key=lambda path: _step(path) or 0, default=None)


def inspect(folder: Path, copy_to: Path | None = None) -> Checkpoint:
    """Reads every byte of a checkpoint and compares it with the marker. ``copy_to``: a new folder that gets exactly
    the bytes that were compared. Raises ResumeError, or OSError if the copy cannot be written."""
    for place in (folder.parent, folder):
        if place.is_symlink():
            raise _refused(folder, f"{place} is a symbolic link, and what it leads to is not this run's")
    try:
        marker = CheckpointMarker.model_validate_json(_text(folder, MARKER))
    except ValidationError as error:
        first = error.errors()[0]
        raise _refused(folder, f"{MARKER} is damaged: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    if folder.name != f"step_{marker.step}":
        raise _refused(folder, f"its marker is that of step {marker.step}")
    for name in marker.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise _refused(folder, f"its marker names {name}, which is outside of it")
    _check_names(folder, marker)
    if copy_to is not None:
        make_private_dir(copy_to)
    for name, expected in marker.files.items():
        if _digest(folder, name, copy_to) != expected:
            raise _refused(folder, f"{name} is not the file that was written: its hash differs")
    if copy_to is not None:
        _digest(folder, MARKER, copy_to)  # last, as its writer did
    return _described(folder, marker)


def _check_names(folder: Path, marker: CheckpointMarker) -> None:
    found = set()
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place, name)
            inside = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise _refused(folder, f"{inside} is a symbolic link")
            if stat.S_ISDIR(mode):
                continue
            if path.suffix in _PICKLES:
                raise _refused(folder, f"{inside} is a pickle, which can run code when it is loaded")
            if not stat.S_ISREG(mode):
                raise _refused(folder, f"{inside} is no regular file")
            if inside != MARKER and (inside not in marker.files or path.suffix not in _SUFFIXES):
                raise _refused(folder, f"{inside} does not belong to it")
            found.add(inside)
    if missing := sorted(set(marker.files) - found):
        raise _refused(folder, f"{', '.join(missing)} is missing")


def _described(folder: Path, marker: CheckpointMarker) -> Checkpoint:
    try:
        config: dict[str, Any] = json.loads(_text(folder, ADAPTER_CONFIG))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        named, mapping = str(config["base_model_name_or_path"]), config.get("auto_mapping")
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(
            folder, f"{ADAPTER_CONFIG} is no adapter configuration ({type(error).__name__}: {error})"
        ) from None
    if mapping:
        raise _refused(folder, f"{ADAPTER_CONFIG} has auto_mapping = {mapping}, which names code to load")
    if rank != marker.lora_rank:
        raise _refused(folder, f"{ADAPTER_CONFIG} has rank {rank}, its marker {marker.lora_rank}")
    return Checkpoint(folder, marker, alpha, named)


def _names(named: str, base_model: str, model_path: str) -> bool:
    """Whether a base in an adapter's configuration is this model. Folders move with the home and the Hub's cache, so
    of those the part that identifies the model is compared."""
    path = PurePosixPath(named)
    if named in (base_model, model_path):
        return True
    if base_model.startswith(_BUILTIN):
        return path.name == base_model.removeprefix(_BUILTIN)
    if f"models--{base_model.replace('/', '--')}" in path.parts:
        return True
    return Path(named) == Path(base_model).expanduser().absolute()


def _digest(folder: Path, name: str, copy_to: Path | None) -> str:
    """SHA-256 of one file, which also goes to the same place in ``copy_to``."""
    digest = hashlib.sha256()
    try:
        with ExitStack() as files:
            source = files.enter_context(opened(folder / name))
            copied = files.enter_context(_new(copy_to / name)) if copy_to is not None else None
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                if copied is not None:
                    copied.write(block)
            if copied is not None:
                copied.flush()
                os.fsync(copied.fileno())
    except NotAFileError as error:
        raise _refused(folder, f"{name} is {error.reason}") from None
    return digest.hexdigest()


def _new(path: Path) -> BinaryIO:
    make_private_dir(path.parent)
    return open(path, "xb", opener=private)


def _text(folder: Path, name: str) -> bytes:
    try:
        return read_file(folder / name)
    except OSError as error:
        reason = error.reason if isinstance(error, NotAFileError) else error.strerror
        raise _refused(folder, f"{name} cannot be read ({reason})") from None


def _step(path: Path) -> int | None:
    text = path.name.removeprefix("step_")
    return int(text) if text.isdecimal() else None


def _refused(folder: Path, reason: str) -> ResumeError:
    return ResumeError(f"The checkpoint {folder} cannot be continued: {reason}.", hint=_OTHER)

"""Turns a model's name into a folder (or Hub id) that transformers can load.

Invariant: a ``builtin:`` model's folder is either absent, or complete with every file's hash recorded; a damaged one is
repaired, and two processes that ask at once get the same one. Nothing in it is deleted, and nothing in a folder that
we did not make is overwritten.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hermes_rl_mcp.errors import InvalidValueError, PreflightError
from trainer.models import smollm2
from trainer.models.source import MARKER, Origin, Progress, describe_folder, is_intact, write_source

LOCK_TIMEOUT_S = 1800.0
"""Another process may be downloading; longer than any bounded download takes."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Builtin:
    """``make`` fills an empty folder with the model's files and says where they came from."""

    needs_bytes: int
    """Free disk space wanted while it is being made."""
    make: Callable[[Path, Progress], Origin]


def _copy_tiny(folder: Path, progress: Progress) -> Origin:
    progress("copying the tiny model that comes with this package")
    # Not the package's own modes, which let everybody read.
    shutil.copytree(Path(__file__).parent / "tiny", folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    folder.chmod(0o700)
    return Origin(origin="shipped with hermes-rl-mcp")


BUILTINS = {
    "builtin:tiny": Builtin(8_000_000, _copy_tiny),
    smollm2.NAME: Builtin(smollm2.NEEDS_BYTES, smollm2.make),
}


def _silent(text: str) -> None:
    """Progress that nobody asked for."""


def materialise(name: str, model_path: str | Path, progress: Progress = _silent) -> Path:
    """What to load for ``name``.

    ``builtin:`` names are put into ``model_path`` unless they are there and intact. Of any other name ``model_path``
    says what it is: a local folder, which is checked, or a Hub id, which is returned as it is. Raises
    InvalidValueError (no such builtin), PreflightError (cannot be had: disk, network, folder) or MissingExtraError.
    """
    if not name.startswith("builtin:"):
        return _local_or_hub(str(model_path) or name)
    builtin = BUILTINS.get(name)
    if builtin is None:
        raise InvalidValueError(
            f"There is no model '{name}'.",
            hint=f"Built in are {', '.join(BUILTINS)}; else give a Hub id or a local folder.",
            details={"available": list(BUILTINS)},
        )
    folder = Path(model_path).expanduser().absolute()
    if not is_intact(folder, name):
        with _io_errors_explained(name, folder), _only_one(folder, progress):
            if not is_intact(folder, name):  # somebody else may have finished it while we waited
                _put(name, builtin, folder, progress)
    return folder


def _put(name: str, builtin: Builtin, folder: Path, progress: Progress) -> None:
    if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
        raise PreflightError(
            f"{folder} holds files that are not those of {name}.",
            hint="Give an empty or new folder, or move these files away.",
        )
    parent, partial = folder.parent, f".{folder.name}.partial-"
    for leftover in parent.glob(f"{partial}*"):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover)
    _require_space(parent, builtin.needs_bytes, name)
    with tempfile.TemporaryDirectory(dir=parent, prefix=partial) as temporary:
        made = Path(temporary) / "files"
        made.mkdir()
        source = describe_folder(name, builtin.make(made, progress), made)
        write_source(source, made)
        if not folder.exists():
            os.rename(made, folder)
            return
        for file in (*source.files, MARKER):
            os.replace(made / file, folder / file)


@contextmanager
def _only_one(folder: Path, progress: Progress) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that is preparing the same model")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout as error:
            raise PreflightError(
                f"Another process has been preparing {folder} for more than {LOCK_TIMEOUT_S:.0f} s.",
                hint="End that process, then try again.",
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _io_errors_explained(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PreflightError(
            f"{name} could not be written to {folder}: {error.strerror or error}.",
            hint="Free some disk space, or set HERMES_HOME to a larger disk."
            if full
            else "Set HERMES_HOME to a folder this user can write to.",
        ) from error


def _require_space(parent: Path, needed: int, name: str) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise PreflightError(
            f"{name} needs {needed / 1e6:.0f} MB of disk space in {parent}, found {free / 1e6:.0f} MB.",
            hint="Free some disk space, or set HERMES_HOME to a larger disk.",
        )


def _local_or_hub(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.exists() and _HUB_ID.fullmatch(name):
        return Path(name)
    hint = "Give a folder saved by save_pretrained, a Hub id such as Qwen/Qwen3-0.6B, or builtin:tiny."
    if not folder.is_dir():
        raise PreflightError(f"There is no model folder {folder}.", hint=hint)
    if not (folder / "config.json").is_file():
        raise PreflightError(f"The folder {folder} has no config.json, so it holds no model.", hint=hint)
    if not any(folder.glob("*.safetensors")):
        raise PreflightError(
            f"The folder {folder} has no *.safetensors file; other weight formats can run code and are not loaded.",
            hint="Save the model again with save_pretrained, which writes safetensors.",
        )
    return folder.absolute()

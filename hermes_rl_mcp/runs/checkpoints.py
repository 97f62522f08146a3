"""Which checkpoints of a run are complete. A folder without a valid marker, or that lacks a file it names, is none."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from hermes_rl_mcp.contracts.records import CheckpointMarker

_MARKER_NAME = "complete.json"


class Checkpoint(NamedTuple):
    """A finished checkpoint: its folder holds the adapter."""

    path: Path
    marker: CheckpointMarker


def complete(folder: Path) -> list[Checkpoint]:
    """Those in ``folder``, by step."""
    found = [one for path in (folder.iterdir() if folder.is_dir() else ()) if (one := _read(path))]
    return sorted(found, key=lambda one: one.marker.step)


def _read(path: Path) -> Checkpoint | None:
    try:
        marker = CheckpointMarker.model_validate_json((path / _MARKER_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return Checkpoint(path, marker) if all((path / name).is_file() for name in marker.files) else None

"""Scored groups as lines of JSON. Invariant: a file that is there already is never touched; lines are flushed whole."""

from __future__ import annotations

import json
from pathlib import Path

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.errors import InvalidValueError


def free_path(path: Path) -> Path:
    """``path``, or the first of ``stem_1``, ``stem_2``, ... that does not exist."""
    candidate, number = path, 0
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}_{number}{path.suffix}")
    return candidate


def line_of(group: ScoredData) -> str:
    """One line, its end included. Raises ValueError for what JSON cannot say."""
    text = json.dumps(group.model_dump(mode="json"), ensure_ascii=False)
    # Half of a surrogate pair is no text; as an escape it is JSON.
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


class GroupFile:
    """Made at once, beside ``wanted`` if that exists. Raises InvalidValueError if it cannot be."""

    def __init__(self, wanted: Path) -> None:
        if wanted.is_dir():
            raise InvalidValueError(
                f"env.data_path_to_save_groups: {wanted} is a folder.", hint=f"Name a file: {wanted / 'groups.jsonl'}"
            )
        self.path = free_path(wanted)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(exist_ok=False)
        except OSError as error:
            raise InvalidValueError(
                f"env.data_path_to_save_groups: the file {self.path} cannot be made: {error.strerror}.",
                hint="Set it to a path whose folder can be written.",
            ) from error

    def write(self, group: ScoredData) -> None:
        """Appends one line."""
        self.append(line_of(group))

    def append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

"""The latest rollouts of an environment as a person reads them: Atropos' ``train/rollouts``, as a file.

Invariant: never more than ``num_rollouts_to_keep`` groups, whatever the run's length. What a run trained on, step by
step, is the trainer's ``rollouts.jsonl``.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hermes_rl_mcp.files import write_atomic
from hermes_rl_mcp.paths import RunPaths

log = logging.getLogger(__name__)


class RolloutTable:
    """Text and score of the rollouts kept. ``per_group`` -1 = all of a group; ``groups`` 0 = none at all."""

    def __init__(self, groups: int, per_group: int) -> None:
        self._per_group = per_group
        self._groups: deque[list[dict[str, Any]]] = deque(maxlen=groups)
        self._changed = False

    def add(self, group: Mapping[str, Any], step: int, decode: Callable[[list[int]], str]) -> None:
        """The first rollouts of a group."""
        if not self._groups.maxlen:
            return
        count = len(group["tokens"]) if self._per_group < 0 else self._per_group
        rows = zip(group["tokens"][:count], group["scores"][:count], strict=True)
        self._groups.append([{"step": step, "score": score, "text": decode(tokens_T)} for tokens_T, score in rows])
        self._changed = True

    def write(self, run_dir: Path | None) -> None:
        """Replaces ``env_rollouts.jsonl`` of the run. A failed write is no reason to stop: only people read it."""
        if run_dir is None or not self._changed:
            return
        lines = [json.dumps(row) for rows in self._groups for row in rows]
        try:
            write_atomic(RunPaths(run_dir).env_rollouts, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            log.warning("cannot write %s: %s", RunPaths(run_dir).env_rollouts, error)
        self._changed = False

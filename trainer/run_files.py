"""What the trainer reads and mends in a run's own line files when it starts again or fails."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from hermes_rl_mcp.files import write_atomic


def keep_steps_up_to(path: Path, last: int) -> None:
    """Drop the lines of steps that the checkpoint does not know; they will be taken again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
    write_atomic(path, "".join(kept))


def rewards(metrics: Path) -> list[float]:
    """Mean reward of every step on record."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    return [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]


def last_step(metrics: Path) -> int:
    with suppress(OSError, ValueError, IndexError, KeyError):
        return int(json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])["step"])
    return 0

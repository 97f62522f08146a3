"""``hermes-rl runs prune``: shows what would be deleted and how much room that gives, asks, and deletes.

Nothing is deleted unless a person at a terminal says yes or the command says ``--yes``.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime

import typer
from rich.console import Console
from rich.table import Table

from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs import prune

_AGES_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def run(console: Console, home: Home, older_than: str | None, max_size: str | None, *, dry_run: bool, yes: bool) -> int:
    """The exit code: 0 if what was asked for is so, 1 if not everything could be deleted or nobody agreed."""
    if older_than is None and max_size is None:
        raise InvalidValueError(
            "Nothing was said about what to delete.", hint="Add --older-than 30d, --max-size 10G, or both."
        )
    before = time.time() - age_s(older_than) if older_than is not None else None
    most = size_bytes(max_size) if max_size is not None else None
    if dry_run:
        _show(console, prune.plan(prune.survey(home), older_than=before, max_bytes=most), most)
        return 0
    with prune.alone(home):
        planned = prune.plan(prune.survey(home), older_than=before, max_bytes=most)
        _show(console, planned, most)
        if not planned.going:
            return 0
        if not yes and not _agreed():
            console.print("Nothing was deleted.")
            return 1
        return _delete(console, home, planned)


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise InvalidValueError("Nobody is here to be asked.", hint="Add --yes to delete these runs, or --dry-run.")
    return typer.confirm("Delete them for good?")


def _delete(console: Console, home: Home, planned: prune.Plan) -> int:
    freed = problems = 0
    for outcome in prune.delete(home, planned.going):
        if outcome.problem:
            problems += 1
            console.print(f"{outcome.item.run_id} was not deleted: {printable(outcome.problem, 200)}", soft_wrap=True)
        else:
            freed += outcome.item.size_bytes
    console.print(f"{len(planned.going) - problems} runs deleted, {size(freed)} freed.")
    return 1 if problems else 0


def _show(console: Console, planned: prune.Plan, most: int | None) -> None:
    if planned.going:
        table = Table("run", "status", "environment", "ended", "size", box=None, pad_edge=False)
        for item in planned.going:
            ended = datetime.fromtimestamp(item.ended).strftime("%Y-%m-%d %H:%M")
            table.add_row(item.run_id, item.status, printable(item.environment, 40), ended, size(item.size_bytes))
        console.print(table)
        freed = sum(item.size_bytes for item in planned.going)
        console.print(
            f"{len(planned.going)} of {len(planned.everything)} runs, {size(freed)}; {size(planned.left_bytes)} stay. "
            "Checkpoints and adapters go with their run."
        )
    else:
        console.print(f"Nothing to delete: {len(planned.everything)} runs take {size(planned.left_bytes)}.")
    if most is not None and planned.left_bytes > most:
        console.print(f"More than {size(most)} stay, because these runs are not touched:")
        for item in planned.everything:
            if item.kept_because:
                console.print(
                    f"  {item.run_id} {size(item.size_bytes)}: {printable(item.kept_because, 200)}", soft_wrap=True
                )


def age_s(text: str) -> float:
    """``30d`` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if not found:
        raise InvalidValueError(f"{text!r} is not an age.", hint="Write a number and a unit: 12h, 30d, 8w.")
    return float(found[1]) * _AGES_S[found[2]]


def size_bytes(text: str) -> int:
    """``10G`` in bytes; units are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not found:
        raise InvalidValueError(f"{text!r} is not a size.", hint="Write a number and a unit: 500M, 10G.")
    return int(float(found[1]) * _SIZES[found[2]])


def size(count: int) -> str:
    """``1.5 GiB``."""
    for unit in ("T", "G", "M", "K"):
        if count >= _SIZES[unit]:
            return f"{count / _SIZES[unit]:.1f} {unit}iB"
    return f"{count} bytes"

"""``hermes-rl runs`` and ``hermes-rl envs``: what is on disk, read without a server.

Reads through the same operations as the tools, so both always say the same. Only ``stop`` changes anything, and it
only asks: the run's supervisor does the stopping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermes_rl_mcp.cli import curve
from hermes_rl_mcp.cli.text import flagged, number, printable
from hermes_rl_mcp.contracts.results import CheckStatus, GetResults, ListEnvironments, ListRuns
from hermes_rl_mcp.contracts.runs import UNREADABLE, has_ended
from hermes_rl_mcp.operations import environments, evaluation, listing, status, training
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.operations.settings import load_settings
from hermes_rl_mcp.quantities import duration

STOP_TIMEOUT_S = 90.0
"""Three processes, each with a bounded wait after TERM; beyond it the stop goes on without us."""
POLL_S = 0.3
ALL_STEPS, ALL_CHARS = 1_000_000, 10**9
"""A terminal has room: what keeps an agent's answers short does not hold here."""
_STYLES = {"completed": "green", "running": "cyan", "failed": "red", "interrupted": "red", UNREADABLE: "red"}


def context(environ: Mapping[str, str]) -> Context:
    """The operator's settings as a server would load them."""
    return Context(load_settings(environ))


def listed(at: Context, limit: int) -> ListRuns:
    return anyio.run(partial(listing.list_runs, at, limit, page_chars=ALL_CHARS))


def shown(at: Context, run_id: str) -> tuple[CheckStatus, GetResults]:
    """State now and everything measured so far. Does not count as a status check of the agent."""

    async def read() -> tuple[CheckStatus, GetResults]:
        reader = await RunReader.open(at, run_id)
        return status.snapshot(at, reader), await training.get_results(at, run_id, ALL_STEPS)

    return anyio.run(read)


def stop(at: Context, run_id: str, *, wait: bool) -> str:
    """Ask for the stop; with ``wait`` until the run has ended or STOP_TIMEOUT_S. Returns its status."""

    async def ask() -> str:
        answer = await training.stop_training(at, run_id)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        found = answer.status
        while wait and not has_ended(found) and time.monotonic() < deadline:
            await anyio.sleep(POLL_S)
            found = (await RunReader.open(at, run_id)).record.status.value
        return found

    return anyio.run(ask)


def catalog(at: Context) -> ListEnvironments:
    return anyio.run(partial(environments.list_environments, at, page_chars=ALL_CHARS))


def print_list(console: Console, runs: ListRuns) -> None:
    if not runs.runs:
        console.print("No runs yet. hermes-rl demo makes one.")
        return
    table = Table("run", "status", "environment", "model", "step", "reward", "created", box=None, pad_edge=False)
    for row in runs.runs:
        table.add_row(
            row.run_id,
            Text(row.status, style=_STYLES.get(row.status, "")),
            printable(row.environment, 40),
            printable(row.base_model, 40),
            f"{row.step}/{row.total_steps}",
            number(row.reward_mean),
            _local(row.created_at),
        )
    console.print(table)
    if runs.count > len(runs.runs):
        console.print(f"{runs.count - len(runs.runs)} older ones; --limit shows more.")


def _local(stamp: str) -> str:
    """An ISO time as this machine's clock shows it; unreadable runs have none."""
    return datetime.fromisoformat(stamp).astimezone().strftime("%b %d %H:%M") if stamp else ""


def print_run(console: Console, now: CheckStatus, results: GetResults, home_dir: Path) -> None:
    """State, reward curve, latest metrics, and where things are."""
    head = Text.assemble((f"{now.run_id}  ", "bold"), (now.status, _STYLES.get(now.status, "bold")))
    console.print(head.append(f"  {printable(now.environment)} on {printable(results.base_model)}"))
    rows: curve.Rows = [(row.step, row.values) for row in results.history]
    mean = curve.mean_reward(rows)
    facts: dict[str, str] = {
        "step": f"{now.metrics.step or 0} of {now.total_steps}",
        "continues": f"run {now.resumed_from} after step {now.resumed_step}" if now.resumed_from else "",
        **{flag.name: flagged(flag) for flag in now.flags},
        "waiting": now.waiting,
        "doing": now.detail if now.detail != now.waiting else "",
        "error": now.error or "",
        "what to do": now.hint or "",
        "running": duration(now.running_time_minutes * 60) if now.running_time_minutes else "",
        "time left": duration(now.eta_seconds) if now.eta_seconds is not None else "",
        "processes": ", ".join(f"{name} {state}" for name, state in now.processes.items()),
        "mean reward": f"{number(mean.first)} in the first, {number(mean.last)} in the last {_steps(curve.ends(rows))}"
        if mean
        else "",
        "evaluation": evaluation.words(results.evaluation) if results.evaluation else "",
        "adapter": results.adapter_path or "",
        "use it": f"hermes-rl serve {now.run_id}, or hermes-rl export {now.run_id}" if results.adapter_path else "",
        "folder": str(home_dir),
    }
    warned = {flag.name for flag in now.flags}
    for name, text in facts.items():
        if text:
            style = "bold yellow" if name in warned else "bold"
            console.print(Text.assemble((f"{name:<12} ", style), printable(text)), soft_wrap=True)
    if drawing := curve.draw(rows, width=console.width):
        console.print()
        console.print(Text(drawing), no_wrap=True)
    if results.final_metrics:
        console.print()
        table = Table("last step", "", box=None, pad_edge=False)
        for name, value in results.final_metrics.items():
            table.add_row(printable(name, 60), number(value))
        console.print(table)


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def print_environments(console: Console, found: ListEnvironments) -> None:
    table = Table("name", "description", "file", box=None, pad_edge=False)
    table.columns[2].overflow = "fold"  # a path without its end says nothing
    for info in found.environments:
        table.add_row(printable(info.name, 60), printable(info.description, 120), printable(info.file_path))
    console.print(table)
    for problem in found.problems:
        console.print(
            Text.assemble(("Not readable: ", "yellow"), f"{printable(problem.file_path)}: {printable(problem.reason)}"),
            soft_wrap=True,
        )

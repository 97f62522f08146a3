"""What a person sees of the demo: the tools an agent calls, the run's progress, and what training changed.

Writes only to the console it is given, so that ``--json`` can keep stdout for its one object. Text of the model and
of processes is shown with its control characters taken out and is never read as markup.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from hermes_rl_mcp.cli import curve
from hermes_rl_mcp.cli.text import flagged, number, printable
from hermes_rl_mcp.contracts.results import CheckStatus, GetResults
from hermes_rl_mcp.operations import evaluation
from hermes_rl_mcp.quantities import duration

PLAIN_INTERVAL_S = 2.0
"""Between two lines of progress where there is no terminal: enough for a log, not a flood."""


class Progressing(Protocol):
    def update(self, status: CheckStatus) -> None: ...


class View:
    """Prints the demo. One instance per demo."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self, version: str) -> None:
        self._console.print(Text(f"hermes-rl-mcp {version}: an agent's work, tool by tool", style="bold"))

    def call(self, tool: str, arguments: Mapping[str, JsonValue]) -> None:
        """The tool the demo calls now, as a call."""
        shown = ", ".join(f"{name}={printable(repr(value), 200)}" for name, value in arguments.items())
        self._console.print(Text.assemble(("→ ", "cyan"), (tool, "bold cyan"), f"({shown})"))

    def says(self, text: str, style: str = "") -> None:
        """One line of what came back."""
        self._console.print(Text("  " + printable(text), style=style))

    def problem(self, message: str, hint: str = "") -> None:
        self._console.print(Text.assemble(("Error: ", "bold red"), printable(message)))
        if hint:
            self._console.print(Text.assemble(("What to do: ", "bold"), printable(hint)))

    def output(self, title: str, text: str) -> None:
        """Lines of a process, as they are."""
        self._console.print(Text(title, style="bold"))
        self._console.print(Text(printable(text), style="dim"))

    @contextmanager
    def follow(self, total_steps: int) -> Iterator[Progressing]:
        """Progress of the run: a bar on a terminal, lines elsewhere."""
        if not self._console.is_terminal:
            yield _Lines(self._console)
            return
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            transient=True,
        )
        with bar:
            yield _Bar(bar, total_steps)

    def results(self, results: GetResults, rows: curve.Rows) -> None:
        """Reward curve, parts of the reward, the adapter, and one prompt before and after."""
        if drawing := curve.draw(rows, width=self._console.width):
            self._console.print()
            self._console.print(Text(drawing), no_wrap=True)
        if rows:
            self._console.print()
            self._console.print(self._summary(rows))
        if results.preview is not None:
            self._console.print()
            self._console.print(Text.assemble(("prompt  ", "bold"), _end(results.preview.prompt)))
            self._console.print(Text.assemble(("before  ", "bold"), printable(results.preview.before, 600)))
            self._console.print(Text.assemble(("after   ", "bold green"), printable(results.preview.after, 600)))

    def _summary(self, rows: curve.Rows) -> Table:
        count = curve.ends(rows)
        steps = "step" if count == 1 else f"{count} steps"
        table = Table("", f"first {steps}", f"last {steps}", title=None)
        if mean := curve.mean_reward(rows):
            table.add_row("mean reward", number(mean.first), number(mean.last), style="bold")
        for part in curve.reward_parts(rows):
            table.add_row(printable(part.name, 40), number(part.first), number(part.last))
        return table

    def farewell(self, results: GetResults, seconds: float) -> None:
        """Whether it improved, where the weights are and how to look further."""
        self._console.print()
        for flag in results.flags:
            self._line(flag.name, flagged(flag))
        if results.evaluation is not None:
            self._line("evaluation", evaluation.words(results.evaluation))
        self._line("adapter", results.adapter_path or "none was written")
        if results.adapter_path is not None:
            self._line("use it", f"hermes-rl serve {results.run_id}, or hermes-rl export {results.run_id} --merge")
        self._line("time", duration(seconds))
        self._line("look further", f"hermes-rl runs show {results.run_id}")
        self._line("", f"hermes-rl runs logs {results.run_id} --process trainer")

    def _line(self, name: str, text: str) -> None:
        self._console.print(Text.assemble((f"{name:<13} ", "bold"), printable(text)), soft_wrap=True)


def _end(prompt: str, limit: int = 400) -> str:
    """A long prompt holds instructions and examples first; the question is at its end."""
    return printable(prompt if len(prompt) <= limit else "…" + prompt[-limit:].strip()).strip()


class _Bar:
    def __init__(self, bar: Progress, total_steps: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=total_steps, note="")

    def update(self, status: CheckStatus) -> None:
        step = status.metrics.step or 0
        note = _note(status) if step else printable(status.detail, 100)
        self._bar.update(
            self._task, description=status.status, completed=step, total=status.total_steps or None, note=note
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ""
        self._shown_at = float("-inf")

    def update(self, status: CheckStatus) -> None:
        step = status.metrics.step or 0
        text = f"step {step}/{status.total_steps}  {_note(status)}" if step else printable(status.detail, 200)
        line = f"  {status.status}: {text}" if text else f"  {status.status}"
        now = time.monotonic()
        if line != self._shown and now - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown, self._shown_at = line, now
            self._console.print(Text(line), soft_wrap=True)


def _note(status: CheckStatus) -> str:
    """Reward and time left; the first step's pace holds the environment's start and would promise hours."""
    known = status.eta_seconds is not None and (status.metrics.step or 0) > 1
    left = f"  {duration(status.eta_seconds or 0)} left" if known else ""
    doing = f"  ({printable(status.detail, 80)})" if status.detail not in ("", "training") else ""
    return f"reward {number(status.metrics.reward_mean)}{left}{doing}"

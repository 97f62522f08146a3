"""``hermes-rl demo``: does the main job as an agent would, a real MCP client of our own server over stdio.

Everything happens through the ten tools; nothing here reads the run directory. A run that the demo started is either
followed to its end or asked to stop: the first Ctrl-C stops it, the second leaves while the stop goes on. If the server
goes away meanwhile, the run goes on and the demo says so.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO, TypeVar

import anyio
import anyio.abc
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from pydantic import BaseModel, JsonValue
from rich.console import Console

from hermes_rl_mcp import __version__
from hermes_rl_mcp.cli import demo_settings
from hermes_rl_mcp.cli.demo_settings import DemoOptions
from hermes_rl_mcp.cli.demo_view import View
from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.contracts.results import (
    CheckStatus,
    CurrentConfig,
    EditConfig,
    GetResults,
    ListEnvironments,
    Result,
    SelectEnvironment,
    StartTraining,
    StopTraining,
)
from hermes_rl_mcp.contracts.runs import RunStatus, has_ended
from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.paths import Home

CALL_TIMEOUT_S = 120.0
"""Longest wait for one answer. Describing an environment imports it in a child: tens of seconds on a cold disk."""
POLL_S = 5
"""``wait_seconds`` of rl_check_status: the longest the progress display stays unchanged."""
STOP_TIMEOUT_S = 60.0
"""A stop takes seconds; a trainer that writes a large checkpoint may take longer, and the stop goes on without us."""
HISTORY_POINTS = 500
"""As many as the tool gives; a longer run's history is thinned out evenly."""
PASSED_ON = (
    *("HERMES_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "WANDB_", "PIP_", "PYTHON", "VIRTUAL_ENV"),
    *("CUDA_", "NVIDIA_", "LD_LIBRARY_PATH", "OMP_", "MKL_", "OPENBLAS_", "XDG_", "TMPDIR", "LANG", "LC_"),
    *(
        "SSL_CERT",
        "REQUESTS_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    ),
)
"""Beginnings of variables that the server gets besides what the SDK passes anyway."""

ResultT = TypeVar("ResultT", bound=Result)


class ToolFailed(HermesRLError):
    """A tool answered with an error."""


class ServerGone(HermesRLError):
    """The MCP server could not be started, or went away."""


class Summary(BaseModel):
    """The object that ``--json`` prints."""

    run_id: str | None = None
    status: str
    environment: str
    model: str
    steps: int = 0
    reward_first5: float | None = None
    reward_last5: float | None = None
    adapter_path: str | None = None
    seconds: float
    evaluation: Evaluation | None = None
    error: str | None = None
    hint: str | None = None


@dataclass
class _Run:
    """What the demo knows so far; kept outside the flow so that an interrupt finds the run it has to stop."""

    options: DemoOptions
    started_at: float = field(default_factory=time.monotonic)
    environment: str = ""
    run_id: str | None = None
    status: str = "not started"
    results: GetResults | None = None
    error: HermesRLError | None = None
    signum: int | None = None
    """The signal that interrupted the demo."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    def summary(self) -> Summary:
        results = self.results
        return Summary(
            run_id=self.run_id,
            status=self.status,
            environment=self.environment or self.options.environment,
            model=self.options.model,
            steps=results.steps if results else 0,
            reward_first5=results.reward_first5 if results else None,
            reward_last5=results.reward_last5 if results else None,
            evaluation=results.evaluation if results else None,
            adapter_path=results.adapter_path if results else None,
            seconds=round(self.seconds, 1),
            error=self.error.message if self.error else None,
            hint=self.error.hint or None if self.error else None,
        )


def run(options: DemoOptions, environ: Mapping[str, str], *, as_json: bool) -> int:
    """The whole command. Returns the exit code: 0 completed, 1 not, 128 + signal when interrupted."""
    view = View(Console(stderr=as_json, highlight=False))
    demo = _Run(options)
    view.title(__version__)
    anyio.run(_main, demo, view, _server_environ(environ, options))
    if not options.keep_selection:
        _forget_selection(environ)
    if demo.error is not None:
        view.problem(demo.error.message, demo.error.hint)
    if as_json:
        print(json.dumps(demo.summary().model_dump(exclude_none=False)), flush=True)
    if demo.signum is not None:
        return 128 + demo.signum
    return 0 if demo.status == RunStatus.COMPLETED and demo.error is None else 1


async def _main(demo: _Run, view: View, environ: dict[str, str]) -> None:
    async with anyio.create_task_group() as group:
        interrupt = _Interrupt(demo)
        await group.start(interrupt.watch)
        with interrupt.everything, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as server_log:
            try:
                async with _connected(environ, server_log) as client:
                    await _session(demo, view, interrupt, _Agent(client, view))
            except ServerGone as error:
                demo.error = error
            if isinstance(demo.error, ServerGone):
                _show_tail(view, server_log)
        group.cancel_scope.cancel()
    if demo.run_id and not has_ended(demo.status):
        what = "the stop of run" if demo.signum is not None else "run"
        view.says(f"Leaving; {what} {demo.run_id} goes on. See: hermes-rl runs show {demo.run_id}")


async def _session(demo: _Run, view: View, interrupt: _Interrupt, agent: _Agent) -> None:
    """Work; when the work is interrupted, stop what it started."""
    with interrupt.work:
        try:
            await _work(demo, view, agent)
        except HermesRLError as error:
            demo.error = error
    if demo.signum is not None:
        await _stop(demo, view, agent)


async def _work(demo: _Run, view: View, agent: _Agent) -> None:
    await _prepare(demo, view, agent)
    # Shielded: an interrupt during this call would leave a run whose id nobody here knows.
    with anyio.CancelScope(shield=True):
        started = await agent.call(StartTraining, "rl_start_training")
        demo.run_id, demo.status = started.run_id, started.status
    await anyio.lowlevel.checkpoint()
    view.says(f"run {started.run_id}: {started.status}")
    await _follow(demo, view, agent, started.run_id)
    demo.results = await agent.call(
        GetResults, "rl_get_results", run_id=started.run_id, max_points=HISTORY_POINTS, metrics=["reward/"]
    )
    view.results(demo.results, [(row.step, row.values) for row in demo.results.history])
    view.farewell(demo.results, demo.seconds)


async def _prepare(demo: _Run, view: View, agent: _Agent) -> None:
    """List, select, read the configuration, edit it."""
    listed = await agent.call(ListEnvironments, "rl_list_environments")
    view.says("environments: " + ", ".join(e.name for e in listed.environments))
    selected = await agent.call(SelectEnvironment, "rl_select_environment", name=demo.options.environment)
    demo.environment = selected.environment
    config = await agent.call(CurrentConfig, "rl_get_current_config")
    view.says(
        f"{len(config.configurable_fields)} fields can be set, {len(config.locked_fields)} are locked "
        f"(profile {config.profile})"
    )
    names = [f.name for f in config.configurable_fields]
    for name, value in demo_settings.edits(demo.options, selected.environment, names).items():
        await agent.call(EditConfig, "rl_edit_config", field=name, value=value)


async def _follow(demo: _Run, view: View, agent: _Agent, run_id: str) -> None:
    view.call("rl_check_status", {"run_id": run_id, "wait_seconds": POLL_S})
    with view.follow(0) as progress:
        while True:
            status = await agent.check(run_id)
            demo.status = status.status
            progress.update(status)
            if has_ended(status.status):
                break
    view.says(f"run {run_id}: {status.status} after step {status.metrics.step or 0} of {status.total_steps}")
    if status.status != RunStatus.COMPLETED:
        hint = status.hint or f"See: hermes-rl runs logs {run_id}"
        demo.error = HermesRLError(status.error or f"The run ended as {status.status}.", hint=hint)


async def _stop(demo: _Run, view: View, agent: _Agent) -> None:
    """Ask for the stop and wait for its end, within bounds."""
    if demo.run_id is None:
        view.says("Interrupted before a run was started; nothing is left running.")
        return
    if has_ended(demo.status):
        return
    try:
        await agent.call(StopTraining, "rl_stop_training", run_id=demo.run_id)
        view.says(f"Stopping run {demo.run_id} ... (Ctrl-C again leaves while the stop goes on)")
        with anyio.move_on_after(STOP_TIMEOUT_S):
            while not has_ended(demo.status):
                demo.status = (await agent.check(demo.run_id)).status
    except HermesRLError as error:
        demo.error = error
        return
    if has_ended(demo.status):
        view.says(f"Run {demo.run_id} is {demo.status}; nothing of it is left running.")


@asynccontextmanager
async def _connected(environ: dict[str, str], server_log: TextIO) -> AsyncIterator[Client]:
    """A client of our own server. Its stderr goes to ``server_log``; failing to connect is a ServerGone."""
    server = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "hermes_rl_mcp.server", "--transport", "stdio"], env=environ
    )
    connected = False
    try:
        async with Client(stdio_client(server, errlog=server_log), read_timeout_seconds=CALL_TIMEOUT_S) as client:
            connected = True
            yield client
    except (MCPError, OSError, ExceptionGroup) as error:
        if connected:
            raise
        message = f"The MCP server could not be started: {_innermost(error)}."
        raise ServerGone(message, hint="Run: hermes-rl doctor") from error


class _Agent:
    """Calls tools and turns their answers into result models, their errors into exceptions."""

    def __init__(self, client: Client, view: View) -> None:
        self._client = client
        self._view = view

    async def call(self, model: type[ResultT], tool: str, **arguments: JsonValue) -> ResultT:
        self._view.call(tool, {k: v for k, v in arguments.items() if k not in ("max_points", "metrics")})
        return await self._ask(model, tool, arguments)

    async def check(self, run_id: str) -> CheckStatus:
        """One long poll; not shown, the progress display speaks for it."""
        return await self._ask(CheckStatus, "rl_check_status", {"run_id": run_id, "wait_seconds": POLL_S})

    async def _ask(self, model: type[ResultT], tool: str, arguments: dict[str, JsonValue]) -> ResultT:
        try:
            answer = await self._client.call_tool(tool, arguments)
        except MCPError as error:
            raise ServerGone(f"{tool} got no answer: {error}.", hint="Run: hermes-rl doctor") from error
        content = answer.structured_content or {}
        if answer.is_error:
            text = "\n".join(part.text for part in answer.content if part.type == "text")
            raise ToolFailed(str(content.get("error") or text), hint=_hint(content))
        return model.model_validate(content)


class _Interrupt:
    """First signal: the work is cancelled. Second: everything is. Both scopes exist before the work starts."""

    def __init__(self, demo: _Run) -> None:
        self._demo = demo
        self.work = anyio.CancelScope()
        self.everything = anyio.CancelScope()

    async def watch(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for signum in signals:
                if self._demo.signum is None:
                    self._demo.signum = int(signum)
                    self.work.cancel()
                else:
                    self.everything.cancel()


def _hint(content: Mapping[str, JsonValue]) -> str:
    """The tool's own hint, with the lists of names that come with it."""
    hint = str(content.get("hint") or "")
    for key in ("available", "available_fields"):
        names = content.get(key)
        if isinstance(names, list) and names:
            hint += f" Known: {', '.join(map(str, names))}."
    return hint.strip()


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _show_tail(view: View, server_log: TextIO, lines: int = 20) -> None:
    server_log.seek(0)
    tail = server_log.read().splitlines()[-lines:]
    if tail:
        view.output("Last lines of the server:", "\n".join(tail))


def _session_name(keep_selection: bool) -> str:
    """Its own selection file: the user's is left alone, and two demos at once do not edit each other's."""
    return "demo" if keep_selection else f"demo-{os.getpid()}"


def _server_environ(environ: Mapping[str, str], options: DemoOptions) -> dict[str, str]:
    """The demo's user is the operator as well: profile ``local``, and the model of the command line is allowed."""
    passed = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    allowed = [environ.get("HERMES_RL_ALLOW_MODELS", ""), glob.escape(options.model)]
    return {
        **passed,
        "HERMES_RL_SESSION": _session_name(options.keep_selection),
        "HERMES_RL_PROFILE": "local",
        "HERMES_RL_ALLOW_MODELS": ",".join(filter(None, allowed)),
    }


def _forget_selection(environ: Mapping[str, str]) -> None:
    file = Home.from_environ({**environ, "HERMES_RL_SESSION": _session_name(False)}).session_file
    for path in (file, file.with_suffix(".lock")):
        with suppress(OSError):
            path.unlink()

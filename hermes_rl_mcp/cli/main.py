"""``hermes-rl``: the command line. Arguments and printing live here; every command imports what it needs when it runs.

Answers go to stdout, problems to stderr. Exit code 0 means that what was asked for is so.
"""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl_mcp import __version__
from hermes_rl_mcp.cli.config_commands import config_app
from hermes_rl_mcp.cli.envs_commands import envs_app
from hermes_rl_mcp.errors import HermesRLError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="hermes-rl",
    help="Train language models by reinforcement learning on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
runs_app = typer.Typer(no_args_is_help=True, help="Look at training runs, stop them, delete old ones.")
app.add_typer(runs_app, name="runs")
app.add_typer(envs_app, name="envs")
app.add_typer(config_app, name="config")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class LogName(StrEnum):
    """Whose log."""

    API = "api"
    TRAINER = "trainer"
    ENV = "env"
    SUPERVISOR = "supervisor"


class ModelFormat(StrEnum):
    """Of a merged model."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"


class WeightType(StrEnum):
    """As torch names them."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Device(StrEnum):
    """What computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


RunId = Annotated[str, typer.Argument(help="Run id: 8 hex characters.")]


def main() -> None:
    """Entry point of ``hermes-rl``."""
    os.umask(0o077)  # for all that it and its children write
    try:
        app()
    except HermesRLError as error:
        typer.echo(f"Error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"What to do: {_for_people(error.hint)}", err=True)
        sys.exit(1)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _for_people(hint: str) -> str:
    """Hints are written for an agent with tools; here the same thing is a command."""
    commands = {"Call rl_list_runs": "Run hermes-rl runs list", "Call rl_list_environments": "Run hermes-rl envs"}
    for tool, command in commands.items():
        hint = hint.replace(tool, command)
    return hint


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hermes-rl-mcp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command()
def demo(
    env: Annotated[str, typer.Option(help="Environment to train in.")] = "arithmetic",
    model: Annotated[str, typer.Option(help="Model to train.")] = "builtin:tiny",
    data_dir: Annotated[str | None, typer.Option(help="Local data folder, for environments that read one.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    group_size: Annotated[int | None, typer.Option(min=2, help="Answers per problem.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Answers per step.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="field=value; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Text to stderr, one JSON object last on stdout.")] = False,
    keep_selection: Annotated[
        bool, typer.Option(help="Leave the demo's selection and edits in session 'demo'.")
    ] = False,
) -> None:
    """Do an agent's whole job through the ten tools: choose, set, train, follow, and show what was learned."""
    from hermes_rl_mcp.cli import demo as command
    from hermes_rl_mcp.cli.demo_settings import DemoOptions, parse_set

    options = DemoOptions(
        environment=env,
        model=model,
        data_dir=os.path.abspath(os.path.expanduser(data_dir)) if data_dir is not None else None,
        steps=steps,
        group_size=group_size,
        batch_size=batch_size,
        max_tokens=max_tokens,
        sets=dict(parse_set(item) for item in set_ or []),
        keep_selection=keep_selection,
    )
    raise typer.Exit(command.run(options, os.environ, as_json=as_json))


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8766,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, stop nothing.")] = False,
) -> None:
    """Show runs in a browser on this machine: curves, rollouts, logs, and a stop button. Ctrl-C ends it."""
    from hermes_rl_mcp.cli import dashboard as command
    from hermes_rl_mcp.operations.context import Context
    from hermes_rl_mcp.operations.options import Flags
    from hermes_rl_mcp.operations.settings import load_settings

    command.run(Context(load_settings(os.environ, Flags(read_only=read_only))), port)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Say whether this machine can train, and what to do if not. Exit code 1 if there is a problem."""
    from dataclasses import asdict

    from hermes_rl_mcp.cli import doctor as command

    def say(what: str) -> None:
        typer.echo(f"... {what}", err=True)

    found = []
    for finding in command.findings(os.environ, say):
        found.append(finding)
        if not as_json:
            typer.echo(f"{finding.verdict:<8} {finding.name:<20} {finding.found}")
            if finding.fix and finding.verdict != "ok":
                typer.echo(f"{'':<29} {finding.fix}")
    problems = sum(finding.verdict == "problem" for finding in found)
    if as_json:
        _print_json({"ok": problems == 0, "findings": [asdict(finding) for finding in found]})
    else:
        count = "1 problem" if problems == 1 else f"{problems} problems"
        typer.echo(f"{count}: see above." if problems else "No problem: training can run here.")
    raise typer.Exit(1 if problems else 0)


@app.command("install-atropos")
def install_atropos(
    packages: Annotated[list[str] | None, typer.Argument(help="What your environments need besides.")] = None,
) -> None:
    """Make the virtual environment that runs environments written for Atropos (about 1 GB)."""
    from hermes_rl_mcp.cli.install_atropos import install
    from hermes_rl_mcp.paths import Home

    python = install(Home.from_environ(os.environ), packages or [])
    typer.echo(f"Environments written for Atropos run with {python}")


@app.command()
def evaluate(
    run_id: RunId,
    items: Annotated[int, typer.Option(min=5, max=10_000, help="Answers of base and adapter each.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds sample other answers.")] = 0,
    step: Annotated[int | None, typer.Option(min=1, help="Checkpoint; the last one without it.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare base and adapter of a run on held-out items, as at its end. Exit code 1 if that gave no result."""
    import anyio

    from hermes_rl_mcp.cli import runs
    from hermes_rl_mcp.operations import comparing, evaluation

    def say(what: str) -> None:
        if what not in said[-1:]:
            said.append(what)
            typer.echo(f"... {what}", err=True)

    said: list[str] = []
    found = anyio.run(comparing.compare, runs.context(os.environ), run_id, items, seed, step, say)
    typer.echo(found.model_dump_json(indent=2) if as_json else evaluation.words(found))
    raise typer.Exit(0 if found.status == "completed" else 1)


@app.command()
def export(
    run_id: RunId,
    merge: Annotated[bool, typer.Option("--merge", help="Base model and adapter as one model.")] = False,
    format_: Annotated[
        ModelFormat, typer.Option("--format", help="Of the merged model; gguf needs llama.cpp's converter.")
    ] = ModelFormat.SAFETENSORS,
    output: Annotated[
        str | None, typer.Option(help="Folder to make. Default: a name with run and step, in this folder.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Of which checkpoint. Default: the last one.")] = None,
    dtype: Annotated[
        WeightType, typer.Option(help="Of merged weights. auto: the base model's, float32 if that is too coarse.")
    ] = WeightType.AUTO,
    converter: Annotated[str | None, typer.Option(help="llama.cpp's folder, or its convert_hf_to_gguf.py.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a run's trained weights for other programs, with a model card; loads them again and checks them."""
    from hermes_rl_mcp.cli import export as command
    from hermes_rl_mcp.cli import runs

    kind = "gguf" if format_ is ModelFormat.GGUF else ("safetensors" if merge else "adapter")
    done = command.run(
        runs.context(os.environ),
        run_id,
        command.Wanted(kind, output, step, dtype.value, converter, force),
    )
    if isinstance(done, int):
        raise typer.Exit(done)
    if as_json:
        _print_json({"path": str(done.folder), **done.record.model_dump(mode="json")})
    else:
        command.show(_console(), done)


@app.command()
def serve(
    what: Annotated[str, typer.Argument(metavar="RUN", help="Run id; or a model: a folder, a Hub id, builtin:tiny.")],
    step: Annotated[int | None, typer.Option(min=0, help="Of which checkpoint of the run. Default: the last.")] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT folder, for a model.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be an address that others can reach.")
    ] = False,
    device: Annotated[Device, typer.Option(help="auto takes a GPU when torch sees one.")] = Device.AUTO,
) -> None:
    """Serve a run's trained model, and its base model, over the OpenAI API. Ctrl-C ends it."""
    from hermes_rl_mcp.cli import runs
    from hermes_rl_mcp.cli import serve as command

    wanted = command.Wanted(what, step, adapter, host, port, allow_remote, device.value)
    raise typer.Exit(command.run(runs.context(os.environ), wanted))


@runs_app.command("list")
def runs_list(
    limit: Annotated[int, typer.Option(min=1, help="Newest runs shown.")] = 20, as_json: JsonFlag = False
) -> None:
    """List runs, newest first."""
    from hermes_rl_mcp.cli import runs

    found = runs.listed(runs.context(os.environ), limit)
    if as_json:
        _print_json(found.model_dump(mode="json"))
    else:
        runs.print_list(_console(), found)


@runs_app.command("show")
def runs_show(run_id: RunId, as_json: JsonFlag = False) -> None:
    """Show one run: state, reward curve, metrics, adapter."""
    from hermes_rl_mcp.cli import runs

    at = runs.context(os.environ)
    status, results = runs.shown(at, run_id)
    if as_json:
        _print_json({"status": status.model_dump(mode="json"), "results": results.model_dump(mode="json")})
    else:
        runs.print_run(_console(), status, results, at.home.run(run_id).dir)


@runs_app.command("stop")
def runs_stop(run_id: RunId, wait: Annotated[bool, typer.Option(help="Wait until it has ended.")] = True) -> None:
    """Stop one run: environment, trainer (which writes a checkpoint), rollout API."""
    from hermes_rl_mcp.cli import runs
    from hermes_rl_mcp.contracts.runs import has_ended

    status = runs.stop(runs.context(os.environ), run_id, wait=wait)
    typer.echo(f"Run {run_id} is {status}.")
    raise typer.Exit(0 if has_ended(status) or not wait else 1)


@runs_app.command("logs")
def runs_logs(
    run_id: RunId,
    process: Annotated[LogName | None, typer.Option(help="One process; all without it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[int, typer.Option(min=0, help="Last lines of each log.")] = 40,
) -> None:
    """Print the logs of a run's processes."""
    from hermes_rl_mcp.cli import logs, runs
    from hermes_rl_mcp.contracts.runs import has_ended
    from hermes_rl_mcp.operations.reading import known_secrets
    from hermes_rl_mcp.redact import redact_text

    at = runs.context(os.environ)
    runs.shown(at, run_id)  # an unknown run is an error, not an empty log
    names = [process.value] if process else [name.value for name in LogName]
    files = [logs.LogFile(name, at.home.log(name, run_id)) for name in names]
    secrets = known_secrets(at, run_id)
    for line in logs.lines(files, tail):
        typer.echo(redact_text(line, secrets))
    if follow:
        for line in logs.follow(files, lambda: has_ended(runs.shown(at, run_id)[0].status)):
            typer.echo(redact_text(line, secrets))


@runs_app.command("prune")
def runs_prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Delete runs that ended so long ago: 12h, 30d, 8w.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Delete the oldest until all runs take no more: 500M, 10G.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete old runs with their checkpoints, adapters and logs. A run that goes on is never touched."""
    from hermes_rl_mcp.cli import prune, runs

    raise typer.Exit(
        prune.run(_console(), runs.context(os.environ).home, older_than, max_size, dry_run=dry_run, yes=yes)
    )


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


if __name__ == "__main__":
    main()

"""``hermes-rl envs``: list environments, write a new one, check one before hours are spent on it."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

envs_app = typer.Typer(help="List environments, write a new one, check one.")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Kind(StrEnum):
    """What an environment's rollouts are like."""

    SINGLE = "single"
    TOOLS = "tools"


class ServerType(StrEnum):
    """Wire of the endpoint."""

    OPENAI = "openai"
    VLLM = "vllm"
    SGLANG = "sglang"
    TRL = "trl"


@envs_app.callback(invoke_without_command=True)
def envs(context: typer.Context, as_json: _Json = False) -> None:
    """List environments, write a new one, check one. Without a command it lists them."""
    if context.invoked_subcommand is None:
        _list(as_json)


@envs_app.command("list")
def envs_list(as_json: _Json = False) -> None:
    """List environments, and files that could not be read."""
    _list(as_json)


@envs_app.command("new")
def envs_new(
    name: Annotated[str, typer.Argument(help="Of the environment and its file: lower case, digits, underscores.")],
    dataset: Annotated[
        str | None, typer.Option(help="Data with a question and an answer per row: a file, a folder, or a Hub id.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Column of the question, if it cannot be guessed.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column of the answer, if it cannot be guessed.")] = None,
    kind: Annotated[Kind, typer.Option(help="single: one answer. tools: several turns with tools.")] = Kind.SINGLE,
    folder: Annotated[str, typer.Option(help="Where to write it.")] = ".",
) -> None:
    """Write a working environment and its test, to be changed into your own."""
    from hermes_rl_mcp.cli import envs_new as command

    wanted = command.Wanted(name, dataset, question, answer, kind.value, folder)
    command.show(command.write(os.environ, wanted))


@envs_app.command("check")
def envs_check(
    file: Annotated[str, typer.Argument(metavar="FILE[:CLASS]", help="Environment file.")],
    endpoint: Annotated[
        str | None, typer.Option(help="Address of a sampling server, ending in /v1. Default: the local model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to sample from. Default: the profile's.")] = None,
    server_type: Annotated[ServerType, typer.Option(help="Wire of the endpoint.")] = ServerType.OPENAI,
    key_variable: Annotated[
        str, typer.Option(help="Variable with the endpoint's key; its value never stands on a command line.")
    ] = "OPENAI_API_KEY",
    set_: Annotated[list[str] | None, typer.Option("--set", help="field=value; may be repeated.")] = None,
    sample: Annotated[bool, typer.Option(help="Sample a group; without it only what needs no model.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each of the parts.")] = 600.0,
    as_json: _Json = False,
) -> None:
    """Say whether an environment works, before a run: hooks, data, one group, scores. Exit code 1 if it does not."""
    from hermes_rl_mcp.cli import envs_check as command
    from hermes_rl_mcp.cli import runs

    wanted = command.Wanted(file, endpoint, model, server_type.value, key_variable, tuple(set_ or ()), sample, timeout)
    found = []
    for finding in command.findings(runs.context(os.environ), wanted):
        found.append(finding)
        if not as_json:
            command.show(finding)
    problems = sum(finding.verdict == "problem" for finding in found)
    if as_json:
        shown = [finding.model_dump(mode="json", exclude={"fingerprint"}) for finding in found]
        _print_json({"ok": problems == 0, "findings": shown})
    else:
        typer.echo(command.summary(found))
    raise typer.Exit(1 if problems else 0)


def _list(as_json: bool) -> None:
    from hermes_rl_mcp.cli import runs

    found = runs.catalog(runs.context(os.environ))
    if as_json:
        _print_json(found.model_dump(mode="json"))
    else:
        runs.print_environments(_console(), found)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)

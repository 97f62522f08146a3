"""``hermes-rl config``: keys and settings of the server, and its entry in the files of MCP clients."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hermes_rl_mcp.paths import Home

config_app = typer.Typer(
    no_args_is_help=True, help="Keys and settings in $HERMES_HOME/.env; the server's entry in a client's file."
)

_KEYS = "Keys and settings"
_CLIENTS = "Clients"


@config_app.command("set", rich_help_panel=_KEYS)
def config_set(
    key: Annotated[str, typer.Argument(help="Name, for example WANDB_API_KEY.")],
    value: Annotated[str, typer.Argument(help="Value; '-' or nothing reads it from a prompt or stdin.")] = "-",
) -> None:
    """Write one key or setting. With '-' the value never stands on a command line."""
    from hermes_rl_mcp.cli import config
    from hermes_rl_mcp.operations.settings import check_ceiling

    config.check_name(key)
    if value == "-":
        value = typer.prompt(key, hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.read().strip()
    check_ceiling(key, value)
    file = _home().env_file
    config.set_value(file, key, value)
    typer.echo(f"{key}: {config.show(key, value)}. Servers started from now on read it from {file}")


@config_app.command("get", rich_help_panel=_KEYS)
def config_get(key: Annotated[str, typer.Argument(help="Name.")]) -> None:
    """Say whether a key is set; shows the value only of settings that are no secret."""
    from hermes_rl_mcp.cli import config

    values = config.values(_home().env_file)
    typer.echo(config.show(key, values[key]) if key in values else "not set")
    raise typer.Exit(0 if key in values else 1)


@config_app.command("list", rich_help_panel=_KEYS)
def config_list(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False) -> None:
    """All names in the file."""
    from hermes_rl_mcp.cli import config

    file = _home().env_file
    entries = config.entries(file)
    if as_json:
        typer.echo(json.dumps({entry.name: entry.shown for entry in entries}, indent=2, ensure_ascii=False))
        return
    if not entries:
        typer.echo(f"Nothing is set in {file}")
    for entry in entries:
        typer.echo(f"{entry.name} = {entry.shown}")


@config_app.command("unset", rich_help_panel=_KEYS)
def config_unset(key: Annotated[str, typer.Argument(help="Name.")]) -> None:
    """Take one name out of the file."""
    from hermes_rl_mcp.cli import config

    file = _home().env_file
    config.unset_value(file, key)
    typer.echo(f"{key} is no longer in {file}")


Write = Annotated[bool, typer.Option("--write", help="Put it into the client's file; a copy of what was there stays.")]
File = Annotated[str | None, typer.Option("--file", help="Another file, such as a project's .mcp.json.")]
Name = Annotated[str, typer.Option(help="What the client calls the server.")]
Flags = Annotated[list[str] | None, typer.Argument(help="Flags of hermes-rl-mcp, behind --.", metavar="-- FLAGS")]


@config_app.command("claude-desktop", rich_help_panel=_CLIENTS)
def claude_desktop(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for Claude Desktop; --write puts it into claude_desktop_config.json."""
    _client("claude-desktop", write, file, name, flags)


@config_app.command("claude-code", rich_help_panel=_CLIENTS)
def claude_code(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for Claude Code; --write puts it into ~/.claude.json, for all projects."""
    _client("claude-code", write, file, name, flags)


@config_app.command("cursor", rich_help_panel=_CLIENTS)
def cursor(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for Cursor; --write puts it into ~/.cursor/mcp.json."""
    _client("cursor", write, file, name, flags)


@config_app.command("hermes", rich_help_panel=_CLIENTS)
def hermes(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for Hermes; --write puts it into $HERMES_HOME/config.yaml."""
    _client("hermes", write, file, name, flags)


@config_app.command("vscode", rich_help_panel=_CLIENTS)
def vscode(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for VS Code; --write puts it into the user's mcp.json."""
    _client("vscode", write, file, name, flags)


@config_app.command("inspector", rich_help_panel=_CLIENTS)
def inspector(write: Write = False, file: File = None, name: Name = "hermes-rl", flags: Flags = None) -> None:
    """Print the server's entry for the MCP Inspector; --write puts it into ~/.mcp-inspector/mcp.json."""
    _client("inspector", write, file, name, flags)


def _client(client_name: str, write: bool, file: str | None, name: str, flags: list[str] | None) -> None:
    """The entry alone goes to stdout, so that it can be piped; what a person should know goes to stderr."""
    from pathlib import Path

    from hermes_rl_mcp.cli import client_files, clients, config

    client = clients.CLIENTS[client_name]
    found = clients.surroundings(os.environ, config.values(_home().env_file))
    entry = clients.entry(client, found.variables, flags or [])
    path = Path(file).expanduser().absolute() if file else clients.client_file(client_name, os.environ)
    for sentence in found.left_out:
        typer.echo(f"note: {sentence}", err=True)
    if not write:
        typer.echo(f"for {client.title}, in {path} (or run it again with --write):", err=True)
        typer.echo(client_files.document(client, name, entry), nl=False)
        return
    done = client_files.write(client, path, name, entry)
    if not done.changed:
        typer.echo(f"{name} stands in {path} already; nothing was changed.")
        return
    kept = f" What was there before: {done.backup}" if done.backup else ""
    typer.echo(f"{name} is in {path}.{kept}\n{client.then}")


def _home() -> Home:
    from hermes_rl_mcp.paths import Home

    return Home.from_environ(os.environ)

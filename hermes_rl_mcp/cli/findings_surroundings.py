"""Keys, variables, environments, the hub, and how a client starts the server. No value of a key is ever shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from hermes_rl_mcp.catalog.scan import scan
from hermes_rl_mcp.cli import config
from hermes_rl_mcp.cli.clients import COMMAND, FOR_CHILDREN, KEYS, server_command
from hermes_rl_mcp.cli.findings import Finding
from hermes_rl_mcp.cli.text import printable
from hermes_rl_mcp.paths import bundled_environments
from hermes_rl_mcp.redact import SECRET_PREFIX, redact_text

HUB_TIMEOUT_S = 5.0
HUB = "https://huggingface.co"
_OURS = ("HERMES_HOME", "HERMES_RL_")
_SHOWN_CHARS = 160


def keys(file: Path, effective: Mapping[str, str]) -> Iterator[Finding]:
    """Which are set, and whether a server that a client starts will see them."""
    in_file = _values(file)
    names = [*KEYS, *sorted(name for name in effective if name.startswith(SECRET_PREFIX))]
    for name in names:
        if in_file.get(name):
            yield Finding(name, "ok", f"set in {file} (***)")
        elif effective.get(name):
            fix = f"Clients pass no keys on to a server; to make it stay: hermes-rl config set {name} -"
            yield Finding(name, "warning", "set in this shell only (***)", fix)
        else:
            yield Finding(name, "ok", f"not set; only if you use that service: hermes-rl config set {name} -")


def variables(file: Path, environ: Mapping[str, str], effective: Mapping[str, str]) -> Iterator[Finding]:
    """What a server started here would work with, and where each value comes from."""
    in_file = _values(file)
    ours = sorted(name for name in effective if name.startswith(_OURS) and not name.startswith(SECRET_PREFIX))
    for name in [*FOR_CHILDREN, *(name for name in ours if name not in KEYS and not config.secret_like(name))]:
        value = effective.get(name)
        if value is None:
            continue
        shown = printable(redact_text(value), _SHOWN_CHARS)
        if name in environ and name in in_file and environ[name] != in_file[name]:
            fix = f"The shell's value wins here; a client that does not pass it on gets the one in {file}."
            yield Finding(name, "warning", f"{shown} (this shell; {file} says otherwise)", fix)
        elif name in environ and name not in in_file and name in FOR_CHILDREN:
            fix = f"Clients do not pass it on; to make it stay: hermes-rl config set {name} '{shown}'"
            yield Finding(name, "warning", f"{shown} (this shell only)", fix)
        else:
            yield Finding(name, "ok", f"{shown} ({'this shell' if name in environ else file})")
    yield Finding("PATH of a run", "ok", printable(effective.get("PATH", "not set"), _SHOWN_CHARS))


def environments(folders: Sequence[str]) -> Iterator[Finding]:
    """By their source text alone."""
    found = scan(bundled_environments(), [Path(folder) for folder in folders])
    if not any(info.source == "bundled" for info in found.environments):
        fix = "Reinstall hermes-rl-mcp: its files are incomplete."
        yield Finding("environments", "problem", f"none in {bundled_environments()}", fix)
    names = ", ".join(printable(info.name, 40) for info in found.environments)
    yield Finding("environments", "ok", f"{len(found.environments)}: {printable(names, _SHOWN_CHARS)}")
    for problem in found.problems:
        text = f"{printable(problem.file_path)}: {printable(problem.reason, 200)}"
        yield Finding("environment file", "warning", text, "Repair it or move it away; the others are not affected.")


def hub(effective: Mapping[str, str]) -> Finding:
    """Whether the model hub answers. Without it the embedded and all local models work."""
    address = effective.get("HF_ENDPOINT", HUB).rstrip("/")
    if effective.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Finding("hub", "ok", "not asked: HF_HUB_OFFLINE is set, so only what is on disk is used")
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if address.startswith("http://"):
        names = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((effective[name] for name in names if effective.get(name)), None)
    fix = "Check the connection, HTTPS_PROXY and HF_ENDPOINT. Embedded and local models need no hub."
    try:
        with httpx.Client(proxy=proxy, trust_env=False, timeout=HUB_TIMEOUT_S) as client:
            status = client.head(address).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        text = redact_text(str(error) or type(error).__name__)
        return Finding("hub", "warning", f"{address} is not reachable: {printable(text, 200)}", fix)
    by = " by a proxy" if proxy else ""
    if status >= 500:
        return Finding("hub", "warning", f"{address} answers{by} with status {status}", fix)
    return Finding("hub", "ok", f"{address} answers{by}")


def client() -> Finding:
    """What stands as the command in a client's file."""
    command = server_command()
    if len(command) > 1:
        fix = "Install the package into this Python: pip install hermes-rl-mcp"
        return Finding("client", "warning", f"the command {COMMAND} is not installed", fix)
    return Finding("client", "ok", f"in its mcpServers file: command {command[0]} (hermes-rl config cursor, ...)")


def _values(file: Path) -> Mapping[str, str]:
    try:
        return config.values(file)
    except (OSError, UnicodeDecodeError):  # said elsewhere
        return {}

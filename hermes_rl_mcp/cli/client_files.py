"""Puts our entry into a client's file.

Invariant: all that others wrote stays as it is; a file that cannot be read as what it should be is not touched; what
was there before stays beside it, readable by its owner alone.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from hermes_rl_mcp.cli import jsonc, yamlplaces
from hermes_rl_mcp.cli.clients import COMMAND, Client
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError
from hermes_rl_mcp.files import make_private_dir

MAX_FILE_BYTES = 64 * 2**20
_TRIES = 5
_BOM = "\ufeff"


class _ChangedMeanwhileError(Exception):
    """Somebody else wrote the file between our reading and writing it."""


@dataclass(frozen=True)
class Written:
    """What became of a file."""

    file: Path
    changed: bool
    backup: Path | None
    """Of what was there before."""


def document(client: Client, name: str, entry: Mapping[str, JsonValue]) -> str:
    """The entry as a whole file of ``client``."""
    whole = {client.container: {name: dict(entry)}}
    if client.form == "yaml":
        dumped: str = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=4096)
        return dumped
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def merged(client: Client, text: str, name: str, entry: Mapping[str, JsonValue]) -> str:
    """``text`` with the entry in its place. Of an entry that is there already, what the user added stays.

    Raises ValueError if ``text`` is not what the client's file should be.
    """
    mark, text = (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)
    if not text.strip():
        return mark + document(client, name, entry)
    relaxed = client.form == "jsonc"
    loaded = yamlplaces.load(text) if client.form == "yaml" else jsonc.parse(text, relaxed=relaxed).value
    present = _mapping(_mapping(_mapping(loaded).get(client.container)).get(name))
    wanted = _over(client, present, entry)
    if wanted == present:
        return mark + text
    if client.form == "yaml":
        return mark + yamlplaces.with_member(text, client.container, name, wanted)
    return mark + jsonc.with_member(text, client.container, name, wanted, relaxed=relaxed)


def write(client: Client, file: Path, name: str, entry: Mapping[str, JsonValue]) -> Written:
    """Merges the entry into ``file``. Raises HermesRLError, and the file is as it was."""
    target = file.resolve()  # a link to a file elsewhere stays a link
    try:
        make_private_dir(target.parent)
        for _ in range(_TRIES):
            before = _read(target)
            new = _merged_or_refused(client, file, before, name, entry)
            if new == before:
                return Written(file, False, None)
            try:
                return Written(file, True, _replaced(target, before, new))
            except _ChangedMeanwhileError:
                continue
    except OSError as error:
        raise HermesRLError(
            f"{file} cannot be written: {error.strerror or error}.",
            hint="Print the entry by leaving out --write, and put it there yourself.",
        ) from error
    raise HermesRLError(
        f"{client.title} changes {file} all the time.", hint="Close it, then run the same command again."
    )


def _read(target: Path) -> bytes | None:
    try:
        with target.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_FILE_BYTES:
        raise OSError(None, f"larger than {MAX_FILE_BYTES} bytes", str(target))
    return data


def _merged_or_refused(
    client: Client, file: Path, before: bytes | None, name: str, entry: Mapping[str, JsonValue]
) -> bytes:
    try:
        return merged(client, (before or b"").decode(), name, entry).encode()
    except (ValueError, RecursionError) as error:
        form = "YAML" if client.form == "yaml" else "JSON"
        raise InvalidValueError(
            f"{file} was not changed: as {form} for {client.title} it is not right ({error}).",
            hint="Repair it or move it away; or leave out --write, and put there yourself what is printed.",
        ) from error


def _replaced(target: Path, before: bytes | None, new: bytes) -> Path | None:
    """Returns the backup; None if there was nothing before. Raises _ChangedMeanwhileError, and all is as it was."""
    mode = stat.S_IMODE(target.stat().st_mode) if before is not None else 0o600
    fd, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    aside = Path(name)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(new)
            stream.flush()
            os.fsync(stream.fileno())
        aside.chmod(mode)
        backup = _kept(target, before) if before is not None else None
        if _read(target) != before:
            if backup is not None:
                backup.unlink()
            raise _ChangedMeanwhileError
        aside.replace(target)
        return backup
    finally:
        aside.unlink(missing_ok=True)


def _kept(target: Path, data: bytes) -> Path:
    """A copy under a name that was free: ``mcp.json.20261130T014500Z.bak``."""
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    number = 0
    while True:
        suffix = f".{number}" if number else ""
        path = target.with_name(f"{target.name}.{moment}{suffix}.bak")
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
        return path


def _over(client: Client, present: Mapping[str, Any], entry: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """What starts the server is ours; flags, variables and settings that the user added stay."""
    made: dict[str, JsonValue] = {**entry, **present, "command": entry["command"], "args": entry["args"]}
    if client.typed:
        made["type"] = entry["type"]
    made["env"] = {**_mapping(present.get("env")), **_mapping(entry["env"])}
    is_ours = Path(str(present.get("command", ""))).name == COMMAND
    if is_ours and isinstance(present.get("args"), list) and not _has_flags(entry):
        made["args"] = present["args"]
    for key in ("url", "headers"):  # of a server over HTTP, which this entry was until now
        made.pop(key, None)
    return made


def _has_flags(entry: Mapping[str, JsonValue]) -> bool:
    arguments = entry["args"]
    return isinstance(arguments, list) and arguments[-2:] != ["--transport", "stdio"]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

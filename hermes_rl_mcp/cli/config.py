"""``hermes-rl config``: keys and settings in ``$HERMES_HOME/.env``, which every server reads at its start.

Clients start a server with almost no environment, so this file is where keys belong. It is written whole and then
renamed, readable by its owner alone; no value that could be a secret is ever printed.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dotenv
from filelock import FileLock

from hermes_rl_mcp.errors import InvalidValueError, NotFoundError

LOCK_TIMEOUT_S = 10.0
"""A writer holds the lock for milliseconds."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_PUBLIC = (
    "HERMES_",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "CUDA_VISIBLE_DEVICES",
)


@dataclass(frozen=True)
class Entry:
    """One line of the file, fit to be shown."""

    name: str
    shown: str


def is_secret(name: str) -> bool:
    """Everything is, except names known to be settings."""
    return secret_like(name) or not name.startswith(_PUBLIC)


def secret_like(name: str) -> bool:
    """Whether the name itself says so."""
    return bool(_SECRET.search(name))


def check_name(name: str) -> str:
    if not _NAME.match(name):
        raise InvalidValueError(
            f"{name!r} is not a variable name.", hint="Use letters, digits and underscores, for example WANDB_API_KEY."
        )
    return name


def set_value(file: Path, name: str, value: str) -> None:
    """Write one variable; the others and the comments stay as they are."""
    check_name(name)
    if not value or "\n" in value or "\0" in value:
        found = "is empty" if not value else "has a line break or a zero byte"
        raise InvalidValueError(f"The value for {name} {found}.", hint="Give one line of text.")
    with _rewriting(file) as copy:
        dotenv.set_key(copy, name, value)


def unset_value(file: Path, name: str) -> None:
    if name not in values(file):
        raise NotFoundError(f"{name} is not in {file}.", hint="hermes-rl config list shows what is.")
    with _rewriting(file) as copy:
        dotenv.unset_key(copy, name)


def values(file: Path) -> dict[str, str]:
    """The file as it stands; nothing is taken from the environment."""
    if not file.exists():
        return {}
    return {name: value or "" for name, value in dotenv.dotenv_values(file, interpolate=False).items()}


def entries(file: Path) -> list[Entry]:
    return [Entry(name, show(name, value)) for name, value in sorted(values(file).items())]


def show(name: str, value: str) -> str:
    """The value, or for whatever could be a secret only that there is one."""
    if not value:
        return "(empty)"
    return "set (not shown)" if is_secret(name) else value


@contextmanager
def _rewriting(file: Path) -> Iterator[Path]:
    """A private copy of ``file`` to change; it replaces the file when the block ends well."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(f"{file}.lock", timeout=LOCK_TIMEOUT_S):
        fd, name = tempfile.mkstemp(prefix=".env-", dir=file.parent)  # readable by the owner alone from the start
        copy = Path(name)
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(file.read_bytes() if file.exists() else b"")
            yield copy
            copy.chmod(0o600)
            copy.replace(file)
        finally:
            copy.unlink(missing_ok=True)

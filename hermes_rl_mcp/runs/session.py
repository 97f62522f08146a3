"""Which environment is selected and what was edited: one small file that every server process shares.

A change is made under a file lock on what is on disk at that moment and replaces the file atomically (0600), so two
clients that edit at once lose nothing. Nothing is remembered in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hermes_rl_mcp.errors import HermesRLError, RevisionConflictError
from hermes_rl_mcp.files import make_private_dir, write_atomic
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.locks import holding

SESSION_SCHEMA_VERSION = 1
_LOCK_TIMEOUT_S = 10.0
"""The lock is held for a read and a rename; longer means that its file system does not let go of it."""


class Session(BaseModel):
    """Selection and edits. ``revision`` rises by one with every change."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SESSION_SCHEMA_VERSION
    revision: int = 0
    selection: int = 0
    """The revision at which the environment was selected: edits belong to one selection."""
    environment: str | None = None
    file_path: str | None = None
    class_name: str | None = None
    wandb_name: str | None = None
    edits: dict[str, JsonValue] = Field(default_factory=dict)


class SessionStore:
    """The session file of one home."""

    def __init__(self, home: Home) -> None:
        self._path = home.session_file

    def read(self) -> Session:
        """What is on disk; an empty session if there is no file. Raises HermesRLError if it cannot be read."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Session()
        except OSError as error:
            raise HermesRLError(f"The session file {self._path} cannot be read: {error.strerror}.") from error
        try:
            session = Session.model_validate_json(text)
        except ValidationError as error:
            raise _damaged(self._path) from error
        if session.schema_version > SESSION_SCHEMA_VERSION:
            raise _damaged(self._path)
        return session

    def update(self, change: Callable[[Session], Session], *, selection: int | None = None) -> Session:
        """Apply ``change`` to the session on disk and write it with the next revision.

        With ``selection``, raises RevisionConflictError if the environment was selected anew since.
        """
        with self._locked():
            current = self.read()
            if selection is not None and current.selection != selection:
                raise RevisionConflictError(
                    f"The environment was selected again (now '{current.environment}') while this call was running.",
                    hint="Call rl_get_current_config, then repeat the edit if it still applies.",
                    details={"revision": current.revision, "environment": current.environment},
                )
            return self._write(change(current), current.revision + 1)

    def select(self, session: Session) -> Session:
        """Replace whatever is on disk, readable or not, by a fresh selection."""
        with self._locked():
            try:
                revision = self.read().revision + 1
            except HermesRLError:
                revision = 1  # a damaged file: selecting is how a user gets out of it
            return self._write(session.model_copy(update={"selection": revision}), revision)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_private_dir(self._path.parent)
        except OSError as error:
            raise HermesRLError(
                f"{self._path.parent} cannot be created: {error.strerror}.", hint="Set HERMES_HOME to another folder."
            ) from error
        try:
            with holding(self._path.with_suffix(".lock"), timeout_s=_LOCK_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise HermesRLError(
                f"The session file cannot be changed: {error}.",
                hint="Try again; if it stays, end the hanging hermes-rl-mcp process.",
            ) from error

    def _write(self, session: Session, revision: int) -> Session:
        written = session.model_copy(update={"revision": revision})
        try:
            write_atomic(self._path, written.model_dump_json(indent=1))
        except OSError as error:
            raise HermesRLError(f"The session file {self._path} cannot be written: {error.strerror}.") from error
        return written


def _damaged(path: Path) -> HermesRLError:
    return HermesRLError(
        f"The session file {path} cannot be understood (damaged, or written by a newer version).",
        hint="Call rl_select_environment to start a fresh selection.",
    )

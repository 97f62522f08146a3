"""Which environment is selected and what was edited: one small file that every server process shares.

A change is made under a file lock on what is on disk at that moment and replaces the file atomically (0600). Each
field's last change is kept with its revision and its writer, so that whoever has not seen a change of somebody else can
be told of it instead of writing over it. Nothing is remembered in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hermes_rl_mcp.errors import HermesRLError, RevisionConflictError
from hermes_rl_mcp.files import make_private_dir, read_file, write_atomic
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.runs.locks import holding

SESSION_SCHEMA_VERSION = 1
_LOCK_TIMEOUT_S = 10.0
"""The lock is held for a read and a rename; longer means that its file system does not let go of it."""


class Change(BaseModel):
    """Who changed something last, and with which revision."""

    model_config = ConfigDict(extra="forbid")

    revision: int
    writer: str


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
    selected_by: str = ""
    """Writer of ``selection``."""
    changes: dict[str, Change] = Field(default_factory=dict)
    """Of each edited field."""

    def unseen(self, revision: int, reader: str) -> dict[str, str]:
        """Fields that somebody else than ``reader`` changed after ``revision``, with the writer of each."""
        return {
            field: change.writer
            for field, change in self.changes.items()
            if change.revision > revision and change.writer != reader
        }


@dataclass(frozen=True)
class Edit:
    """One field's new value. ``expected`` is the revision that the one who edits wants to build upon; ``shown`` the
    last one that this writer has shown to anybody (None = it has shown nothing)."""

    field: str
    value: JsonValue
    writer: str
    selection: int
    """Of the session for which the value was checked."""
    expected: int | None = None
    shown: int | None = None


class SessionStore:
    """The session file of one home."""

    def __init__(self, home: Home) -> None:
        self._path = home.session_file

    def read(self) -> Session:
        """What is on disk; an empty session if there is no file. Raises HermesRLError if it cannot be read."""
        try:
            text = read_file(self._path)
        except FileNotFoundError:
            return Session()
        except OSError as error:
            raise HermesRLError(
                f"The session file {self._path} cannot be read: {error.strerror or error}.",
                hint="Fix its permissions, or set HERMES_HOME to another folder.",
            ) from error
        try:
            session = Session.model_validate_json(text)
        except ValidationError as error:
            raise _damaged(self._path) from error
        if session.schema_version > SESSION_SCHEMA_VERSION:
            raise _damaged(self._path)
        return session

    def edit(self, edit: Edit) -> Session:
        """Sets one field of the session on disk, which gets the next revision.

        Raises RevisionConflictError, and changes nothing, if that would write over something unseen: with
        ``expected``, any other revision; without, a change by another writer after what was shown, or a selection made
        since the value was checked.
        """
        with self._locked():
            current = self.read()
            _refuse_unseen(current, edit)
            revision = current.revision + 1
            changes = {**current.changes, edit.field: Change(revision=revision, writer=edit.writer)}
            edits = {**current.edits, edit.field: edit.value}
            return self._write(current.model_copy(update={"edits": edits, "changes": changes}), revision)

    def select(self, session: Session) -> Session:
        """Replaces whatever is on disk, readable or not, by a fresh selection. The last one to select wins: that
        somebody edited another environment meanwhile is no reason to refuse it."""
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
            raise HermesRLError(
                f"The session file {self._path} cannot be written: {error.strerror or error}. Nothing was changed.",
                hint="Free some disk space or fix the folder's permissions, then repeat the call.",
            ) from error
        return written


def _refuse_unseen(current: Session, edit: Edit) -> None:
    """Own edits after ``shown`` are no secret to this writer; after ``expected`` anybody's count."""
    explicit = edit.expected is not None
    seen = edit.expected if explicit else edit.shown
    anew = current.selection != edit.selection
    unseen: dict[str, str] = {}
    if seen is not None:
        reader = "" if explicit else edit.writer
        unseen = current.unseen(seen, reader)
        # A revision that went back: the file was damaged and begun anew.
        anew = anew or seen > current.revision or (current.selection > seen and current.selected_by != reader)
    if not (anew or unseen or (explicit and seen != current.revision)):
        return
    if anew:
        by = f" by {current.selected_by}" if current.selected_by else ""
        what = f"environment '{current.environment}' was selected{by}"
    else:
        what = "changed were " + ", ".join(f"{field} (by {writer})" for field, writer in unseen.items())
    since = f"since revision {seen} {what}" if seen is not None else f"meanwhile {what}"
    raise RevisionConflictError(
        f"'{edit.field}' was not changed: {since}; the configuration is at revision {current.revision} now.",
        hint="Call rl_get_current_config, then repeat the edit if it still applies, with the new revision if you give "
        "one.",
        details={"revision": current.revision, "environment": current.environment, "changed_fields": unseen},
    )


def _damaged(path: Path) -> HermesRLError:
    return HermesRLError(
        f"The session file {path} cannot be understood (damaged, or written by a newer version).",
        hint="Call rl_select_environment to start a fresh selection.",
    )

"""Patches over several files in the form ``*** Begin Patch``: read, and worked out against the files' contents.

Invariant: a patch is worked out whole before anything is written; one that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hermes_rl_mcp.agent.tools.replacing import replaced
from hermes_rl_mcp.errors import InvalidValueError

_HEADS = {"*** Update File:": "update", "*** Add File:": "add", "*** Delete File:": "delete", "*** Move File:": "move"}
FORM = (
    "*** Begin Patch, then for each file '*** Update File: PATH' with hunks ('@@ where', lines beginning with ' ', '-' "
    "or '+'), '*** Add File: PATH' with lines beginning with '+', '*** Delete File: PATH' or "
    "'*** Move File: OLD -> NEW', then *** End Patch"
)


@dataclass
class FileChange:
    """What a patch does to one file."""

    kind: str
    path: str
    new_path: str | None = None
    hunks: list[list[str]] = field(default_factory=list)
    """Each hunk's lines, with their first character."""


def parsed(text: str) -> list[FileChange]:
    """Raises InvalidValueError where it is no patch."""
    changes: list[FileChange] = []
    for line in text.replace("\r\n", "\n").strip("\n").split("\n"):
        stripped = line.strip()
        if stripped in ("*** Begin Patch", "*** End Patch", "*** End of File"):
            continue
        head = next((head for head in _HEADS if stripped.startswith(head)), None)
        if head:
            changes.append(_change(_HEADS[head], stripped.removeprefix(head).strip()))
        elif stripped.startswith("*** Move to:") and changes:
            changes[-1].new_path = stripped.removeprefix("*** Move to:").strip()
        elif not changes:
            raise _no_patch(f"The patch begins with {line[:60]!r}.")
        elif line.startswith("@@"):
            changes[-1].hunks.append([])
        elif line[:1] in (" ", "-", "+") or not line:
            if not changes[-1].hunks:
                changes[-1].hunks.append([])
            changes[-1].hunks[-1].append(line or " ")
        else:
            raise _no_patch(f"A line begins with neither ' ', '-' nor '+': {line[:60]!r}.")
    if not changes:
        raise _no_patch("The patch names no file.")
    return changes


def worked_out(changes: list[FileChange], read: Callable[[str], str | None]) -> dict[str, str | None]:
    """Path to its content afterwards, None = deleted. ``read`` gives a file's content, None where there is no file.
    Raises InvalidValueError for the first part that does not fit."""
    after: dict[str, str | None] = {}

    def current(path: str) -> str | None:
        return after[path] if path in after else read(path)

    for change in changes:
        content = current(change.path)
        if change.kind == "add":
            if content is not None:
                raise InvalidValueError(f"{change.path} is there already.", hint="Use '*** Update File:' for it.")
            after[change.path] = _added(change)
            continue
        if content is None:
            raise InvalidValueError(f"There is no file {change.path}.", hint="Look for it with search_files.")
        if change.kind == "delete":
            after[change.path] = None
            continue
        for number, hunk in enumerate(change.hunks, 1):
            content = _with_hunk(content, hunk, change.path, number)
        if change.new_path:
            if current(change.new_path) is not None:
                raise InvalidValueError(f"{change.new_path} is there already.", hint="Move to another path.")
            after[change.path] = None
        after[change.new_path or change.path] = content
    return after


def _change(kind: str, path: str) -> FileChange:
    new_path = None
    if kind == "move":
        path, arrow, new_path = (part.strip() for part in path.partition("->"))
        if not arrow or not new_path:
            raise _no_patch("'*** Move File:' needs 'OLD -> NEW'.")
    if not path:
        raise _no_patch("A file has no path.")
    return FileChange(kind, path, new_path)


def _added(change: FileChange) -> str:
    lines = [line for hunk in change.hunks for line in hunk]
    return "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))


def _with_hunk(content: str, hunk: list[str], path: str, number: int) -> str:
    while hunk and not hunk[-1].strip():
        hunk = hunk[:-1]
    old = "\n".join(line[1:] for line in hunk if line[0] != "+")
    new = "\n".join(line[1:] for line in hunk if line[0] != "-")
    if old == new:
        return content
    if not old:  # nothing but new lines: they go to the end
        return f"{content}{'' if content.endswith(chr(10)) or not content else chr(10)}{new}\n"
    if not new and f"{old}\n" in content:
        old = f"{old}\n"
    try:
        return replaced(content, old, new)[0]
    except InvalidValueError as error:
        sentence = error.message.replace("old_string", "the text of its ' ' and '-' lines")
        raise InvalidValueError(f"{path}, hunk {number}: {sentence}", hint=error.hint) from None


def _no_patch(sentence: str) -> InvalidValueError:
    return InvalidValueError(sentence, hint=f"The form is: {FORM}.")

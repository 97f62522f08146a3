"""Finds the text that a model means to replace, although it may have got blanks wrong. Pure functions of text.

Invariant: what is replaced was found in exactly one place, unless all places are wanted; a looser reading counts only
where every stricter one found nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from hermes_rl_mcp.errors import InvalidValueError

_BLANKS = re.compile(r"[ \t]+")
_LOOSE: tuple[Callable[[str], str], ...] = (
    str.rstrip,
    lambda line: _BLANKS.sub(" ", line).rstrip(),
    lambda line: _BLANKS.sub(" ", line).strip(),
)
"""How lines are compared when the text as such is not there: blanks at the end do not count, then how many blanks, then
the indentation."""


def replaced(content: str, old: str, new: str, *, replace_all: bool = False) -> tuple[str, int]:
    """The new content and how many places were changed. Raises InvalidValueError, in words for a model."""
    if not old:
        raise InvalidValueError("old_string is empty.", hint="Give the text to replace; write_file makes whole files.")
    if old == new:
        raise InvalidValueError("old_string and new_string are the same.", hint="Nothing would change.")
    if count := content.count(old):
        _one_only(count, replace_all)
        return content.replace(old, new), count
    for normal in _LOOSE:
        if places := _places(content, old, normal):
            _one_only(len(places), replace_all)
            for start, end in reversed(places):
                content = content[:start] + _indented(new, old, content[start:end]) + content[end:]
            return content, len(places)
    raise InvalidValueError("old_string is not in the file.", hint=_nearest(content, old))


def _one_only(count: int, replace_all: bool) -> None:
    if count > 1 and not replace_all:
        raise InvalidValueError(
            f"old_string is in the file {count} times.",
            hint="Give more lines around it so that it is there once, or set replace_all.",
        )


def _places(content: str, old: str, normal: Callable[[str], str]) -> list[tuple[int, int]]:
    """Start and end of each run of whole lines that equal those of ``old``; runs do not overlap."""
    wanted = [normal(line) for line in old.strip("\n").split("\n")]
    if not any(wanted):
        return []
    lines = content.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    compared = [normal(line) for line in lines]
    found, at = [], 0
    while at + len(wanted) <= len(lines):
        if compared[at : at + len(wanted)] == wanted:
            end = at + len(wanted)
            # A text that ends with its line end takes the file's along; without, that stays.
            with_end = old.endswith("\n") and end < len(lines)
            found.append((starts[at], starts[end] if with_end else starts[end] - 1))
            at = end
        else:
            at += 1
    return found


def _indented(new: str, old: str, found: str) -> str:
    """``new`` moved by what the first line of the found text is indented more than the first line of ``old``."""
    asked, there = _indent(old.lstrip("\n")), _indent(found)
    if asked == there:
        return new
    lines = []
    for line in new.split("\n"):
        if there.startswith(asked):
            lines.append(there[len(asked) :] + line if line.strip() else line)
        else:
            extra = len(asked) - len(there)
            lines.append(line[extra:] if line[:extra].isspace() else line.lstrip())
    return "\n".join(lines)


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" \t"))]


def _nearest(content: str, old: str) -> str:
    """Where a first line of the text is, for the next try."""
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    numbers = [str(number) for number, line in enumerate(content.split("\n"), 1) if first and first in line]
    if numbers:
        return f"Its first line is in line {', '.join(numbers[:5])}, but what follows differs. Read the file there."
    return "Read the file and copy the text as it stands there."

"""A window in bytes of a log that grows, without the secrets that may stand in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.files import opened
from hermes_rl_mcp.redact import masked_in_place, spellings

MAX_WINDOW_BYTES = 262_144
_MARGIN_BYTES = 4_096
"""Looked at before and after a window: a key that a window cuts in two does not look like one."""


class LogWindow(NamedTuple):
    """``text`` has hidden characters still; ``offset``, ``length`` and ``size`` are bytes of the file."""

    text: str
    offset: int
    length: int
    size: int


def log_window(path: Path, offset: int, limit: int, secrets: Sequence[str]) -> LogWindow:
    """``limit`` bytes from ``offset`` on, below 0 the last ones; empty while there is no file. Raises NotFoundError.

    Secrets are masked before the window is cut, byte for byte, so that two windows together show none.
    """
    known = [one.encode(errors="surrogatepass") for one in spellings(list(secrets))]
    margin = max([_MARGIN_BYTES, *map(len, known)])
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - limit) if offset < 0 else offset
            first = max(0, begin - margin)
            file.seek(first)
            data = file.read(begin - first + limit + margin)
    except FileNotFoundError:
        return LogWindow("", 0, 0, 0)
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror}.", hint="The other logs may say more.") from error
    for one in known:
        data = data.replace(one, b"*" * len(one))
    data = masked_in_place(data.decode("latin-1")).encode("latin-1")  # a character for each byte
    window = data[begin - first :][:limit]
    return LogWindow(window.decode("utf-8", "replace"), begin, len(window), size)

"""An offline corpus of pages with BM25 search, by SQLite's full-text index in memory.

A corpus is a JSON lines file: ``{"url": ..., "title": ..., "text": ...}`` on each line. Invariant: the same corpus and
query give the same results in the same order.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hermes_rl_mcp.errors import InvalidValueError

_WORD = re.compile(r"\w+")
_MAX_WORDS = 40


@dataclass(frozen=True)
class Found:
    """One result of a search, of whatever backend."""

    url: str
    title: str
    description: str


class Corpus:
    """Pages by URL and by words. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._base.execute(
            "CREATE VIRTUAL TABLE pages USING fts5(title, text, url UNINDEXED, tokenize='porter unicode61')"
        )
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self._base.execute("INSERT INTO pages VALUES (?, ?, ?)", _row(path, number, line))

    def search(self, query: str, limit: int) -> list[Found]:
        """The best pages first; a word in the title counts twice."""
        words = [f'"{word}"' for word in dict.fromkeys(_WORD.findall(query.casefold()))][:_MAX_WORDS]
        if not words:
            return []
        asked = (
            "SELECT url, title, snippet(pages, 1, '', '', ' ... ', 40) FROM pages WHERE pages MATCH ? "
            "ORDER BY bm25(pages, 2.0, 1.0), rowid LIMIT ?"
        )
        with self._lock:
            rows = self._base.execute(asked, (" OR ".join(words), limit)).fetchall()
        return [Found(*row) for row in rows]

    def page(self, url: str) -> tuple[str, str] | None:
        """Title and text."""
        with self._lock:
            row = self._base.execute("SELECT title, text FROM pages WHERE url = ?", (url,)).fetchone()
        return (row[0], row[1]) if row else None


def open_corpus(path: str) -> Corpus:
    """The corpus of a file, read once for as long as it stays the same. Raises InvalidValueError."""
    try:
        facts = os.stat(path)
        return _opened(str(Path(path).absolute()), facts.st_mtime_ns, facts.st_size)
    except OSError as error:
        raise InvalidValueError(
            f"The corpus {path} cannot be read: {error.strerror}.",
            hint="Name a JSON lines file of url, title and text.",
        ) from None


@lru_cache(maxsize=4)
def _opened(path: str, changed_ns: int, file_bytes: int) -> Corpus:
    return Corpus(Path(path))


def _row(path: Path, number: int, line: str) -> tuple[str, str, str]:
    try:
        page = json.loads(line)
        return str(page["title"]), str(page["text"]), str(page["url"])
    except (ValueError, KeyError, TypeError):
        raise InvalidValueError(
            f"{path}, line {number}: no JSON object with url, title and text.", hint="Correct the corpus."
        ) from None

"""Parses Python source one text at a time.

CPython 3.11 counts the depth of a syntax tree per interpreter, not per thread: two threads that parse at once can both
fail with SystemError. Warnings are silenced for the whole process, too, so that is done under the same lock.
"""

from __future__ import annotations

import ast
import threading
import warnings

_PARSING = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """What ``ast.parse`` gives or raises. An odd escape in somebody's file is no news for our log."""
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)

"""What is said of user code's errors and values. Invariant: one short line each, whatever their own text is or does."""

from __future__ import annotations

import os
import traceback
from logging import Formatter
from typing import Any

from pydantic_core import ErrorDetails

from hermes_rl_mcp.redact import redact, secret_values

ERROR_CHARS = 600
VALUE_CHARS = 80
TRACEBACK_CHARS = 20_000
"""In a log. An exception may carry a whole answer of a server, and come again with each group."""


def said(error: BaseException) -> str:
    """``KeyError: 'x'``. Of a group of exceptions the first one, which is what happened."""
    error = first_of(error)
    name = type(error).__name__
    text = _text(error, str, "its own text cannot be made")
    return f"{name}: {cut(' '.join(text.split()), ERROR_CHARS)}" if text else name


def shown(value: object) -> str:
    """``int 5``, with a long value cut."""
    return f"{type(value).__name__} {cut(_text(value, repr, 'its own text cannot be made'), VALUE_CHARS)}"


def found_wrong(fault: ErrorDetails) -> str:
    """``Input should be a valid integer, found 'many'``, of what pydantic found wrong. A secret is not shown; of a rule
    across fields, whose input are all of them, its own words alone."""
    message = fault["msg"].rstrip(".")
    if not fault["loc"]:
        return message
    found = redact({str(fault["loc"][-1]): fault["input"]}, secret_values(os.environ))
    return f"{message}, found {cut(repr(next(iter(found.values()))), VALUE_CHARS)}"


def first_of(error: BaseException) -> BaseException:
    """The first exception that is no group of them."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def traceback_of(error: BaseException) -> str:
    """As Python writes it; the middle of a very long one is left out."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as problem:  # noqa: BLE001 - user code: the text of an exception is made by its own method
        text = f"{type(error).__name__}, whose traceback cannot be written: {type(problem).__name__}\n"
    return _middle_out(text)


class ShortTracebacks(Formatter):
    """For log handlers of a process that runs user code."""

    def formatException(self, ei: Any) -> str:
        return traceback_of(ei[1]).rstrip("\n") if ei[1] is not None else ""

    def format(self, record: Any) -> str:
        return _middle_out(super().format(record))


def _middle_out(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS:
        return text
    half = TRACEBACK_CHARS // 2
    return f"{text[:half]}\n... {len(text) - TRACEBACK_CHARS} characters left out ...\n{text[-half:]}"


def _text(value: object, how: Any, otherwise: str) -> str:
    try:
        text = str(how(value))
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file takes
        return text.encode("utf-8", "backslashreplace").decode()
    except Exception:  # noqa: BLE001 - user code
        return f"({otherwise})"
    return text

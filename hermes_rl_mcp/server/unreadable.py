"""Answers requests that the SDK cannot read and would leave without an answer: a client would wait until it gives up.

Most come about by an emoji that somebody cut in two, or by arguments that are nested without end.
"""

from __future__ import annotations

import json

import mcp.types as t

_FAR = 2**53


def answer_to(line: str) -> t.JSONRPCError | None:
    """None for a message that can be read, and for one that cannot and is no request or does not say which."""
    try:
        t.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        pass
    else:
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or "method" not in found or not _is_id(found.get("id")):
        return None
    said = "This request cannot be read: it holds half a character (\\ud83d), is nested too deep, or is no JSON-RPC."
    return t.JSONRPCError(jsonrpc="2.0", id=found["id"], error=t.ErrorData(code=t.INVALID_REQUEST, message=said))


def _is_id(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii()
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _FAR

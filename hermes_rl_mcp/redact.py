"""Masks secrets before text leaves a process: in results, resources, logs and saved configurations.

A value is masked when its key names a secret or when the value itself has the shape of a well-known key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
_SECRET_KEY = re.compile(
    r"(?:^|[_\-.])(?:api[_\-]?key|apikey|access[_\-]?key|private[_\-]?key|secret|passw(?:or)?d|passphrase|credentials?"
    r"|authorization|bearer|(?:auth|hf|access|api|bot|refresh)[_\-]?token|nonce|path[_\-]?prefix)$|^token$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(?:sk-[A-Za-z0-9_\-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|xox[abprs]-[A-Za-z0-9\-]{10,}|AKIA[0-9A-Z]{16}|tml-[A-Za-z0-9]{16,}|AIza[0-9A-Za-z_\-]{30,})"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=\-]{8,}")
_ASSIGNED = re.compile(
    r"(?i)\b([A-Z0-9_\-]*(?:api[_\-]?key|secret|password|auth[_\-]?token|access[_\-]?token|hf[_\-]?token)[\"']?\s*[=:]\s*[\"']?)"
    r"([^\s\"',;}\]]{4,})"
)
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.\-]*://)[^/\s:@]+:[^/\s@]+@")


def is_secret_name(name: str) -> bool:
    """Whether a field or variable of this name holds a secret."""
    return _SECRET_KEY.search(name) is not None


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` with everything masked that looks like a key, and each of ``secrets`` wherever it occurs."""
    for secret in secrets:
        if len(secret) >= 6:  # shorter ones would blank out ordinary words
            text = text.replace(secret, MASK)
    text = _SECRET_VALUE.sub(MASK, text)
    text = _BEARER.sub(rf"\g<1>{MASK}", text)
    text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    return _URL_USER.sub(rf"\g<1>{MASK}@", text)


def redact(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A copy of JSON-like data with secrets masked. Empty values stay, so that "not set" remains visible."""
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_name(str(key)) and _holds_something(item) else redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return redact_text(value, secrets)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [redact(item, secrets) for item in value]
    return value


def redact_field(name: str, value: Any) -> Any:
    """One value as ``redact`` would show it under this name."""
    return redact({name: value})[name]


def _holds_something(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", "x")

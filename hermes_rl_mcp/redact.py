"""Masks secrets before text leaves a process: in results, resources, logs and saved configurations.

A value is masked when its key names a secret, when it has the shape of a well-known key, or when it is one of the
secrets that the caller knows, also URL-encoded, in hex or in base64. A secret that a program cut in two, encrypted or
encoded twice is not found: no masking can promise that.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

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
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_MIN_CHARS = 6
SECRET_PREFIX = "HERMES_RL_SECRET_"
"""Of variables that hold secrets for environments. A configuration names them, ``$HERMES_RL_SECRET_JUDGE``."""
_REFERENCE = re.compile(rf"\${SECRET_PREFIX}[A-Z0-9_]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=\-]{8,}")
# Each can begin at few places of a text, and soon knows that it does not: the text may have been made to take long.
_ASSIGNED = re.compile(
    r"(?i)(?<![A-Z0-9_\-])"
    r"([A-Z0-9_\-]*(?:api[_\-]?key|secret|password|auth[_\-]?token|access[_\-]?token|hf[_\-]?token)[\"']?\s*[=:]\s*[\"']?)"
    r"([^\s\"',;}\]]{4,})"
)
_PARTS_OF_VALUES = ("sk-", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xox", "AKIA", "tml-", "AIza")
_PARTS_OF_NAMES = ("key", "secret", "password", "token")
"""What every match of the two patterns above has in it."""
_SHORTEST_MATCH = len("a://b:c@")
_URL_USER = re.compile(r"(?i)([a-z][a-z0-9+.\-]{0,30}://)[^/\s:@]+:[^/\s@]+@")


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a field or variable of this name holds a secret."""
    return _SECRET_KEY.search(name) is not None


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names say that they hold a secret."""
    return [value for name, value in environ.items() if _SECRET_VARIABLE.search(name) and len(value) >= _MIN_CHARS]


def is_reference(value: Any) -> bool:
    """Whether a value names a variable that holds the secret: ``$HERMES_RL_SECRET_JUDGE``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def holds_secret(name: str, value: Any) -> bool:
    """Whether this would put a secret where it does not belong: a value, not a reference, under a secret's name, at
    any depth, or a text in the shape of a key."""
    if isinstance(value, Mapping):
        return any(holds_secret(str(key), item) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return any(holds_secret(name, item) for item in value)
    return isinstance(value, str) and (
        (is_secret_name(name) and _holds_something(value)) or _SECRET_VALUE.search(value) is not None
    )


def spellings(secrets: Iterable[str]) -> list[str]:
    """Each secret as it may stand in a text, the longest first: as it is, URL-encoded, in hex, in base64."""
    found: set[str] = set()
    for secret in secrets:
        if len(secret) < _MIN_CHARS:  # shorter ones would blank out ordinary words
            continue
        data = secret.encode(errors="surrogatepass")
        found |= {secret, quote(secret, safe=""), quote_plus(secret), data.hex(), data.hex().upper()}
        for before in range(3):  # base64 depends on how many bytes stand before
            for alphabet in (base64.b64encode, base64.urlsafe_b64encode):
                encoded = alphabet(bytes(before) + data).decode()
                found.add(encoded[-(-8 * before // 6) : 8 * (before + len(data)) // 6])
    return sorted((one for one in found if len(one) >= _MIN_CHARS), key=len, reverse=True)


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` with everything masked that looks like a key, and each of ``secrets`` wherever it occurs."""
    return _masked(text, spellings(secrets))


def masked_in_place(text: str) -> str:
    """``text`` with everything that looks like a key written over, character for character."""
    for pattern in (_SECRET_VALUE, _BEARER, _ASSIGNED, _URL_USER):
        text = pattern.sub(_written_over, text)
    return text


def _written_over(found: re.Match[str]) -> str:
    kept = found[1] if found.re.groups else ""
    return kept + "*" * (len(found[0]) - len(kept))


def redact(value: Any, secrets: Sequence[str] = ()) -> Any:
    """A copy of JSON-like data with secrets masked. Empty values stay, so that "not set" remains visible."""
    return _redact(value, spellings(secrets))


def redact_field(name: str, value: Any) -> Any:
    """One value as ``redact`` would show it under this name."""
    return redact({name: value})[name]


def _redact(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _masked(value, known)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_name(str(key)) and _holds_something(item) else _redact(item, known)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_redact(item, known) for item in value]
    return value


def _masked(text: str, known: Sequence[str]) -> str:
    for one in known:
        text = text.replace(one, MASK)
    if len(text) < _SHORTEST_MATCH:
        return text
    if _has_one_of(_PARTS_OF_VALUES, text):  # much quicker than a search that finds nothing
        text = _SECRET_VALUE.sub(MASK, text)
    folded = text.casefold()
    if "bearer" in folded:
        text = _BEARER.sub(rf"\g<1>{MASK}", text)
    if ("=" in text or ":" in text) and _has_one_of(_PARTS_OF_NAMES, folded):
        text = _ASSIGNED.sub(rf"\g<1>{MASK}", text)
    return _URL_USER.sub(rf"\g<1>{MASK}@", text) if "://" in text and "@" in text else text


def _has_one_of(parts: Sequence[str], text: str) -> bool:
    for part in parts:  # noqa: SIM110 - any() with a generator takes three times as long
        if part in text:
            return True
    return False


def _holds_something(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", "x") and not is_reference(value)

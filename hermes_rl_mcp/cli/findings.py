"""What a check says: a verdict, what was found, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "problem"]
"""``problem``: something will not work, or is not safe. ``warning``: worth knowing, and nothing has to be done."""


@dataclass(frozen=True)
class Finding:
    """One line. ``fix`` is there for whatever is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""

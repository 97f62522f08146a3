"""The one error of this program: it becomes the reply, so that the caller can say it in its own terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hermes_rl_mcp.contracts.datasets import ViewFailure


class ViewError(Exception):
    """What happened and what was found; ``failure`` is the reply."""

    def __init__(
        self,
        kind: Literal["not_found", "invalid", "unreachable", "extra"],
        error: str,
        *,
        hint: str = "",
        available: Sequence[str] | None = None,
    ) -> None:
        super().__init__(error)
        names = None if available is None else list(available)
        self.failure = ViewFailure(kind=kind, error=error, hint=hint, available=names)


def no_such_split(split: str, available: Sequence[str]) -> ViewError:
    return ViewError("not_found", f"There is no split '{split}'.", hint="Name one of these.", available=available)

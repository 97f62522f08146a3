"""What ``hermes-rl envs check`` found: one line of JSON per finding, as the checking child writes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

CheckVerdict = Literal["ok", "warning", "problem", "skipped"]
"""``problem``: training cannot work. ``warning``: it can, but this is worth a look. ``skipped``: could not be looked at
here."""


class CheckFinding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(extra="forbid")

    name: str
    verdict: CheckVerdict
    found: str
    fix: str = ""
    """For whatever is not ok."""
    where: str = ""
    """``FILE:LINE`` of the place that is to be changed, where one is known."""
    fingerprint: str | None = None
    """Of the held-out items, so that a second process can see whether it gets the same ones."""

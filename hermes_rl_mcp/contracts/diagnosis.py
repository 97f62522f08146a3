"""What is wrong with a run that still goes on: named flags, each with its evidence and the setting to change."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FlagName = Literal[
    "stalled",
    "all_truncated",
    "zero_variance",
    "adapter_not_moving",
    "sampler_behind",
    "rewards_missing",
    "not_finite",
    "groups_failing",
    "disk_low",
]


class Flag(BaseModel):
    """One finding. It disappears when its evidence does."""

    name: FlagName
    severity: Literal["warning", "error"]
    """``error``: nothing is learned while this lasts."""
    evidence: str
    """What was seen, with numbers: 'steps 3 to 5: 100 % of completions ended at max_token_length = 16'."""
    advice: str
    """What to do, naming the setting."""
    setting: str | None = None
    """The field to change with rl_edit_config, if one would help."""
    since_step: int | None = None

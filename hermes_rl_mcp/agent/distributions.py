"""How often a rollout has which toolsets: 17 named distributions and a sampler that a seed repeats.

Each toolset is drawn on its own. Invariant: the draws of a seed do not depend on what is available, so that a missing
extra changes nothing for the other toolsets. The numbers are those of the later original, without its ``moa`` set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TextIO

from hermes_rl_mcp.agent.toolsets import BUILTIN, Toolsets
from hermes_rl_mcp.errors import InvalidValueError


@dataclass(frozen=True)
class Distribution:
    """Percent for each toolset, drawn independently."""

    description: str
    toolsets: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        return {"description": self.description, "toolsets": dict(self.toolsets)}


_COLUMNS = ("web", "browser", "vision", "image_gen", "terminal", "file")
_TABLE: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("default", (100, 100, 100, 100, 100, 100), "every toolset, always"),
    ("image_gen", (55, 0, 90, 90, 45, 0), "making pictures, with some looking up"),
    ("research", (90, 70, 50, 0, 10, 0), "research on the web"),
    ("science", (94, 50, 65, 15, 94, 94), "scientific work: web, commands and files"),
    ("development", (30, 0, 10, 0, 80, 80), "programming"),
    ("safe", (80, 70, 60, 60, 0, 0), "no commands and no files"),
    ("balanced", (50, 50, 50, 50, 50, 50), "each as likely as not"),
    ("minimal", (100, 0, 0, 0, 0, 0), "the web alone"),
    ("terminal_only", (0, 0, 0, 0, 100, 100), "commands and files"),
    ("terminal_web", (100, 0, 0, 0, 100, 100), "commands and files, with documentation from the web"),
    ("creative", (30, 0, 90, 90, 0, 0), "pictures, made and looked at"),
    ("reasoning", (90, 0, 0, 0, 20, 60), "thinking, with sources and notes"),
    ("browser_use", (80, 100, 70, 0, 0, 0), "everything in a browser"),
    ("browser_only", (0, 100, 0, 0, 0, 0), "a browser and nothing else"),
    ("browser_tasks", (0, 97, 12, 0, 15, 0), "tasks for a browser"),
    ("terminal_tasks", (97, 75, 50, 10, 97, 97), "tasks for a terminal"),
    ("mixed_tasks", (35, 92, 15, 15, 92, 92), "tasks for a browser, a terminal or both"),
)
DISTRIBUTIONS: Mapping[str, Distribution] = MappingProxyType(
    {
        name: Distribution(text, MappingProxyType({s: p for s, p in zip(_COLUMNS, row, strict=True) if p}))
        for name, row, text in _TABLE
    }
)


def get_distribution(name: str) -> dict[str, Any] | None:
    """``{description, toolsets: {name: percent}}`` or None."""
    found = DISTRIBUTIONS.get(name)
    return found.as_dict() if found else None


def list_distributions() -> dict[str, dict[str, Any]]:
    return {name: one.as_dict() for name, one in DISTRIBUTIONS.items()}


def validate_distribution(name: str) -> bool:
    return name in DISTRIBUTIONS


def sample_toolsets_from_distribution(
    name: str,
    *,
    seed: int | str | None = None,
    rng: random.Random | None = None,
    available: Collection[str] | None = None,
    toolsets: Toolsets = BUILTIN,
) -> list[str]:
    """The toolsets of one draw, in the table's order; if none came up, the most likely one that can be had.

    ``seed``: the same one gives the same draw; ``rng`` instead goes on where it is. ``available``: what can be had
    here (None = everything known); the rest is left out. Raises InvalidValueError (a ValueError) for an unknown name.
    """
    found = DISTRIBUTIONS.get(name)
    if found is None:
        raise InvalidValueError(
            f"There is no distribution {name[:80]!r}.",
            hint=f"Distributions: {', '.join(DISTRIBUTIONS)}.",
            details={"available": list(DISTRIBUTIONS)},
        )
    rng = rng or random.Random(seed)
    drawn = [one for one, percent in found.toolsets.items() if rng.random() * 100 < percent]
    usable = {one for one in found.toolsets if toolsets.is_known(one) and (available is None or one in available)}
    if chosen := [one for one in drawn if one in usable]:
        return chosen
    most_likely = sorted(usable, key=lambda one: (-found.toolsets[one], _COLUMNS.index(one)))
    return most_likely[:1]


def distribution_info(name: str) -> str:
    """A distribution as lines of text. Raises InvalidValueError."""
    found = DISTRIBUTIONS.get(name)
    if found is None:
        raise InvalidValueError(
            f"There is no distribution {name[:80]!r}.", hint=f"Distributions: {', '.join(DISTRIBUTIONS)}."
        )
    rows = sorted(found.toolsets.items(), key=lambda row: -row[1])
    return "\n".join([f"{name}: {found.description}", *(f"  {one:<10} {percent:>3} %" for one, percent in rows)])


def print_distribution_info(name: str, stream: TextIO | None = None) -> None:
    """``distribution_info`` on ``stream``, stderr by default: stdout belongs to whoever speaks a protocol on it."""
    (stream or sys.stderr).write(f"{distribution_info(name)}\n")

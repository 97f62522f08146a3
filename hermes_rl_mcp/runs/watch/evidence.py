"""What is known of a run's course, and the numbers that decide whether something is wrong with it.

Invariant: a figure that is absent, null or not finite is None here, never a guess; other people's words leave quoted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.contracts.vitals import EnvState, Vitals
from hermes_rl_mcp.redact import redact_text

Line = Mapping[str, JsonValue]


@dataclass(frozen=True)
class Thresholds:
    """Every number that a flag depends on, but one: what a stall is, its supervisor says (``Limits.stall_s``)."""

    window: int = 20
    """Steps that are looked at: enough to name a first step, few enough to be read in no time."""
    steps: int = 3
    """Steps in a row. One batch may be all wrong by chance; a cause that lasts is told by its third step."""
    truncated: float = 0.9
    """From here on hardly any answer ends by itself, so the reward says little about whole answers."""
    adapter_steps: int = 2
    """Optimizer steps after which the B matrices, which start at zero, cannot all be zero still: the first moves them
    by the learning rate. The second is a margin."""
    all_right: float = 0.99
    all_wrong: float = 0.01
    """Share of right answers: a stray one among hundreds does not change what to do."""
    lag_warning: float = 2.0
    """Policy versions beyond what ``max_batches_offpolicy`` explains. The loss corrects for a little; where no lag is
    allowed at all, any is too much."""
    lag_error: float = 5.0
    """By then the sampler is not refreshed at all, or the ratio of the policies has lost its meaning."""
    lag_growth: float = 0.9
    """A sampler that is not refreshed falls back by one version per step."""
    groups: int = 3
    """Unusable groups in a row. The environment gives up at 20; the reason is known long before."""
    checkpoints: int = 2
    """An old checkpoint goes only once the next is complete, and the one at the end comes besides."""
    reserve_bytes: int = 64 * 2**20
    """Metrics, logs and journal until somebody looks again."""
    error_chars: int = 240
    """Of an environment's own words."""


@dataclass(frozen=True)
class Evidence:
    """All that is known. ``lines`` are the last of metrics.jsonl, oldest first."""

    record: RunRecord
    lines: Sequence[Line] = ()
    vitals: Vitals | None = None
    env_state: EnvState | None = None
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    """The run's configuration, flat."""
    free_bytes: int | None = None
    """On the file system of the checkpoints."""
    checkpoint_bytes: int | None = None
    """Size of one checkpoint."""
    last_checkpoint: str | None = None
    """Folder of the newest complete one."""

    @property
    def ended(self) -> bool:
        return self.record.status.terminal

    def value(self, name: str) -> str:
        """``name = 16`` if the run's value is known, else the name."""
        return f"{name} = {self.values[name]}" if self.values.get(name) is not None else name


def number(line: Line, name: str) -> float | None:
    """A finite number, else None."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def at_least(line: Line, name: str, least: float) -> bool:
    value = number(line, name)
    return value is not None and value >= least


def step_of(line: Line) -> int:
    return int(number(line, "step") or 0)


def streak_of(lines: Sequence[Line], holds: Callable[[Line], bool]) -> list[Line]:
    """The last lines without a gap for which this holds, oldest first."""
    taken: list[Line] = []
    for line in reversed(lines):
        if not holds(line):
            break
        taken.append(line)
    return taken[::-1]


def span(lines: Sequence[Line]) -> str:
    first, last = step_of(lines[0]), step_of(lines[-1])
    return f"step {last}" if first == last else f"steps {first} to {last}"


def quoted(text: str, limits: Thresholds) -> str:
    """Somebody else's words: secrets masked, cut, in quotes, with control characters spelled out."""
    safe = redact_text(text)
    return repr(safe if len(safe) <= limits.error_chars else safe[: limits.error_chars] + "...")


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"

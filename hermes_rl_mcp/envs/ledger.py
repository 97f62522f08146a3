"""Which groups are under way, by the trainer step at which they were begun: what the rollout API is told.

Invariant: every group begun is counted exactly once more, as sent or as given up, unless it is still under way.
"""

from __future__ import annotations

from hermes_rl_mcp.contracts.rollout_api import BegunGroups


class Ledger:
    """Counts since the environment registered."""

    def __init__(self) -> None:
        self._groups: dict[int, BegunGroups] = {}
        self.given_up = 0
        """Of all steps."""

    def begin(self, step: int, count: int = 1) -> None:
        self._of(step).begun += count

    def give_up(self, step: int, count: int = 1) -> None:
        self._of(step).given_up += count
        self.given_up += count

    def sent(self, step: int) -> None:
        self._of(step).sent += 1

    def abandon(self) -> None:
        """Whatever is under way is given up."""
        for step, one in self._groups.items():
            self.give_up(step, _under_way(one))

    def groups(self) -> list[BegunGroups]:
        """Of the steps that still have something under way, and the newest; the others are forgotten."""
        newest = max(self._groups, default=0)
        self._groups = {step: one for step, one in self._groups.items() if _under_way(one) or step == newest}
        return [one.model_copy() for one in self._groups.values()]

    def _of(self, step: int) -> BegunGroups:
        return self._groups.setdefault(step, BegunGroups(step=step, begun=0))


def _under_way(one: BegunGroups) -> int:
    return one.begun - one.given_up - one.sent

"""A failed rollout costs itself: by policy it is made again, or its group goes out smaller."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl_mcp.envs import BaseEnv, BaseEnvConfig, ScoredDataItem
from hermes_rl_mcp.envs.base import RolloutsFailedError
from hermes_rl_mcp.envs.groups import checked

pytestmark = pytest.mark.anyio


class Failing(BaseEnv):
    """Rollouts 1 to ``failing`` fail."""

    def __init__(self, failing: int, policy: str) -> None:
        super().__init__(BaseEnvConfig.model_validate({"group_size": 4, "on_failed_rollout": policy}), [])
        self.failing = failing
        self.made = 0

    async def get_next_item(self) -> int:
        return 1

    async def collect_trajectory(self, item: Any) -> tuple[ScoredDataItem, list[Any]]:
        self.made += 1
        if self.made <= self.failing:
            raise ValueError("lost")
        return ScoredDataItem(tokens=[1, 2], masks=[-100, 2], scores=float(self.made)), []


@pytest.mark.parametrize(("policy", "size", "made"), [("replace", 4, 6), ("shrink", 2, 4)], ids=["replace", "shrink"])
async def test_the_policy_decides_what_becomes_of_a_group(policy: str, size: int, made: int) -> None:
    env = Failing(2, policy)
    group, _ = await env.collect_trajectories(1)
    assert isinstance(group, dict)
    assert len(checked(group, group_size=4).scores) == size
    assert env.made == made


async def test_one_answer_alone_is_no_group() -> None:
    with pytest.raises(RolloutsFailedError, match="3 of 4 rollouts failed 1 times: ValueError: lost"):
        await Failing(3, "shrink").collect_trajectories(1)

"""Items that rollouts gave for later: asked before new ones, and part of the saved position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.envs import BaseEnv, Completion, Message
from hermes_rl_mcp.envs.base import FURTHER, Groups
from hermes_rl_mcp.envs.exploration import KEPT_ITEMS
from hermes_rl_mcp.envs.testing import make
from hermes_rl_mcp.errors import ResumeError

pytestmark = pytest.mark.anyio


class Chain(BaseEnv):
    """Each question gives the next one."""

    name = "chain"
    drawn = 0

    async def get_next_item(self) -> str:
        self.drawn += 1
        return f"new {self.drawn}"

    def get_messages(self, item: str) -> list[Message]:
        return [{"role": "user", "content": item}]

    def score_answer(self, item: str, completion: Completion) -> float:
        return float(len(completion.text))

    async def collect_trajectories(self, item: Any) -> tuple[Groups, list[Any]]:
        groups, _ = await super().collect_trajectories(item)
        return groups, [f"after {item}", object()]


async def test_waiting_items_come_first_and_survive_a_restart(tmp_path: Path) -> None:
    env = await make(Chain, ["8", "no"], group_size=2)
    env.checkpoint_dir, env.curr_step = tmp_path, 3
    await env.groups_for("first")
    env.save_checkpoint(3)
    assert await env.next_item() == "after first"
    assert type(await env.next_item()) is object  # it cannot be saved, and is asked as long as the process lives
    assert await env.next_item() == "new 1"

    resumed = await make(Chain, ["8"], group_size=2)
    resumed.checkpoint_dir, resumed.curr_step = tmp_path, 3
    resumed.load_checkpoint()
    assert list(resumed.further_items) == ["after first"]


async def test_no_more_are_saved_than_can_be_written_each_second(tmp_path: Path) -> None:
    env = await make(Chain)
    env.checkpoint_dir = tmp_path
    env.further_items.extend(range(3 * KEPT_ITEMS))
    env.save_checkpoint(0)
    assert len(json.loads((tmp_path / "step-0.json").read_text())[FURTHER]) == KEPT_ITEMS


async def test_a_damaged_position_names_its_file(tmp_path: Path) -> None:
    env = await make(Chain)
    env.checkpoint_dir = tmp_path
    (tmp_path / "step-0.json").write_text("{")
    with pytest.raises(ResumeError, match=r"position .*step-0\.json cannot be read"):
        env.load_checkpoint()

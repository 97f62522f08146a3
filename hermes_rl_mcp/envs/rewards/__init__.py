"""Rewards to score answers with, alone or weighted together; each is called with the answer and the gold.

::

    reward = combine({"correct": BoxedNumber(), "format": (Tags(("think",)), 0.2), "short": (Length(512), 0.1)})

    async def score_answer(self, item, completion):
        return await reward(completion, item["gold"])

Every part is logged under its name (``reward/correct``). Nothing heavy is loaded before the first answer.
"""

from __future__ import annotations

from hermes_rl_mcp.envs.rewards.base import Answer, Combined, Reward, combine, said, text_of
from hermes_rl_mcp.envs.rewards.code import PythonTests
from hermes_rl_mcp.envs.rewards.execution import Limits
from hermes_rl_mcp.envs.rewards.maths import BoxedNumber, MathAnswer
from hermes_rl_mcp.envs.rewards.semantic import Semantic
from hermes_rl_mcp.envs.rewards.shape import Length, Repetition, Tags
from hermes_rl_mcp.envs.rewards.text import EditDistance, Exact, Fuzzy

__all__ = [
    "Answer",
    "BoxedNumber",
    "Combined",
    "EditDistance",
    "Exact",
    "Fuzzy",
    "Length",
    "Limits",
    "MathAnswer",
    "PythonTests",
    "Repetition",
    "Reward",
    "Semantic",
    "Tags",
    "combine",
    "said",
    "text_of",
]

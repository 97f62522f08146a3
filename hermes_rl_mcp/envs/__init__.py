"""The environment SDK: subclass ``BaseEnv``, say how an item is asked and scored, run ``serve | process | evaluate``.

::

    import random

    class Shouting(BaseEnv):
        name = "shouting"

        async def get_next_item(self):
            return random.choice(["hello", "good day"])

        def get_messages(self, item):
            return [{"role": "user", "content": f"Say {item} in capitals."}]

        def score_answer(self, item, completion):
            return float(item.upper() in completion.text)

Importing this loads neither torch nor transformers nor datasets; a tokenizer is loaded when it is first needed.
"""

from __future__ import annotations

from hermes_rl_mcp.envs.base import BaseEnv, EvalReport, Score
from hermes_rl_mcp.envs.config import APIServerConfig, BaseEnvConfig, EvalHandling
from hermes_rl_mcp.envs.sampling import SamplingClient, Session
from hermes_rl_mcp.envs.trajectory import Completion, Message, ScoredDataGroup, ScoredDataItem, Trajectory

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "Completion",
    "EvalHandling",
    "EvalReport",
    "Message",
    "SamplingClient",
    "Score",
    "ScoredDataGroup",
    "ScoredDataItem",
    "Session",
    "Trajectory",
]

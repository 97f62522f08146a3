"""An environment that explores asks what is right half the time more often than what never is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from env_rig import END_ID, TINY, Api, Sampler, child_environ, run_env, serving, until, write_config

GROUP, BATCH, BATCHES = 4, 16, 20
ENVIRONMENT = """
import random
from hermes_rl_mcp.envs import BaseEnv

class Mixed(BaseEnv):
    "One item in ten can be answered, half the time."
    name = "mixed"

    async def setup(self):
        self.rng = random.Random(0)

    async def get_next_item(self):
        return self.rng.choice(["easy", *["hard"] * 9]) + str(self.rng.randrange(8))

    def get_messages(self, item):
        return [{"role": "user", "content": item}]

    def score_answer(self, item, completion):
        return float(completion.text == "8")
"""


def answer(prompt: list[int], index: int) -> list[int]:
    right = b"easy" in bytes(one for one in prompt if one < 256) and index % 2
    return [*(b"8" if right else b"9"), END_ID]


def share_of_easy(folder: Path, environ: dict[str, str], **fields: Any) -> float:
    """Of the last half of the groups that a trainer is given."""
    folder.mkdir()
    (folder / "mixed.py").write_text(ENVIRONMENT)
    api = Api(folder, child_environ(dict(os.environ)))
    api.start()
    with serving(Sampler(answer=answer)) as sampler:
        api.register_trainer(batch_size=BATCH)
        env = {"group_size": GROUP, "batch_size": BATCH, "max_batches_offpolicy": 1, "max_token_length": 8}
        env |= {"tokenizer_name": str(TINY), "rollout_server_url": api.url, "total_steps": 1000, "steps_per_eval": -1}
        env |= {"ensure_scores_are_not_same": False, "use_wandb": False, **fields}
        config = write_config(folder, env, {"base_url": f"{sampler.url}/v1", "server_type": "vllm"})
        spec = f"{folder / 'mixed.py'}:Mixed"
        process = run_env(folder, child_environ(environ), spec, "serve", "--config", str(config))
        try:
            groups: list[dict[str, Any]] = []
            while len(groups) < BATCHES * BATCH // GROUP:
                groups += until(api.take, why=lambda: process.text)
            assert process.stop() == 0
        finally:
            process.stop()
            api.close()
    late = groups[len(groups) // 2 :]
    return sum(len(set(group["scores"])) > 1 for group in late) / len(late)


@pytest.mark.slow
def test_groups_with_a_signal_become_more_than_the_environments_own_choice_has(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    # Of the environment's own choice one item in ten is easy.
    explored = share_of_easy(tmp_path / "explored", environ, exploration_model="item_value", exploration_rate=0.1)
    assert explored > 0.4

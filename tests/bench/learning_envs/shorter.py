"""Everyday questions, and the shorter the answer the better: reward is 1 at no token and 0 at ``max_token_length``.

What the answer says does not count, so every model can learn it, and every trainer can be measured by it.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Completion, Message, Score

SUBJECTS = (
    *("rain", "bread", "a violin", "the moon", "a bicycle", "salt", "a lighthouse", "chess", "honey", "a glacier"),
    *("a compass", "coffee", "a volcano", "paper", "a bridge", "wool", "an echo", "glass", "a windmill", "rust"),
    *("a magnet", "silk", "thunder", "a library", "a tide", "cork", "a prism", "tea", "a pendulum", "a desert"),
)
QUESTIONS = ("Say in one short sentence what {} is.", "In a few words, what is {} good for?")


def questions(seed: int, count: int) -> list[str]:
    """The training questions in their order; the same for the same seed."""
    rng = random.Random(seed)
    return [rng.choice(QUESTIONS).format(rng.choice(SUBJECTS)) for _ in range(count)]


def reward(tokens: int, limit: int) -> float:
    return 1.0 - min(tokens, limit) / limit


class ShorterConfig(BaseEnvConfig):
    """Settings that a small model learns with in a few minutes on a CPU."""

    seed: int = Field(0, ge=0)
    """Order of the questions."""


class ShorterEnv(BaseEnv):
    """Shorter answers score higher."""

    name = "shorter"
    env_config_cls = ShorterConfig
    trainer_defaults: ClassVar[dict[str, JsonValue]] = {"learning_rate": 3e-4, "lora_rank": 16, "lora_alpha": 32.0}
    typical_tokens = (40, 30)

    config: ShorterConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = ShorterConfig(group_size=8, batch_size=32, max_token_length=64, total_steps=100, use_wandb=False)
        return config, [APIServerConfig(base_url="http://127.0.0.1:8001/v1", server_type="vllm")]

    async def setup(self) -> None:
        self._questions = iter(questions(self.config.seed, 100_000))

    async def get_next_item(self) -> str | None:
        return next(self._questions, None)

    def get_messages(self, item: Any) -> list[Message]:
        return [{"role": "user", "content": item}]

    def score_answer(self, item: Any, completion: Completion) -> Score:
        return Score(reward(len(completion.token_ids), self.config.max_token_length))


if __name__ == "__main__":
    ShorterEnv.cli()

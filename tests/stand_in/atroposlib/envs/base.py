"""The environment's base class and its config."""

import json
from abc import ABC, abstractmethod
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from transformers import AutoTokenizer

from atroposlib.envs.server_handling.server_baseline import APIServerConfig as APIServerConfig
from atroposlib.envs.server_handling.server_baseline import ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager


class ScoredDataGroup(dict[str, Any]):
    pass


class EvalHandlingEnum(Enum):
    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    group_size: int = 4
    max_num_workers: int = -1
    max_eval_workers: int = 16
    max_num_workers_per_node: int = 8
    steps_per_eval: int = 100
    max_token_length: int = 2048
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.STOP_TRAIN
    eval_limit_ratio: float = 0.5
    inference_weight: float = 1.0
    batch_size: int = -1
    max_batches_offpolicy: int = 3
    tokenizer_name: str = "none"
    use_wandb: bool = True
    rollout_server_url: str = "http://localhost:8000"
    total_steps: int = 1000
    wandb_name: str | None = None
    ensure_scores_are_not_same: bool = True
    data_path_to_save_groups: str | None = None
    data_dir_to_save_evals: str | None = None
    min_items_sent_before_logging: int = 2
    include_messages: bool = False
    min_batch_allocation: float | None = None
    worker_timeout: float = 600


class BaseEnv(ABC):
    name: str | None = None
    env_config_cls: Any = BaseEnvConfig

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        self.config = config
        self.server = ServerManager(server_configs)
        self.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name)
        self.completion_lengths: list[int] = []
        self.curr_step = 0
        self.checkpoint_dir, self.wandb_prepend = "", None

    @classmethod
    def config_init(cls) -> Any:
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        raise NotImplementedError

    @abstractmethod
    async def get_next_item(self) -> Any: ...

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...

    async def postprocess_histories(self, groups: Any) -> Any:
        return groups

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        pass

    async def evaluate_log(self, metrics: Any, **kwargs: Any) -> None:
        raise ValueError("data_dir_to_save_evals is not set")

    def save_checkpoint(self, step: int, data: Any = None) -> None:
        folder = Path(self.checkpoint_dir) / "env_checkpoints" / str(self.wandb_prepend)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"step-{step}.json").write_text(json.dumps(data))

    async def cleanup(self) -> None:
        pass

    @classmethod
    def cli(cls) -> None:
        raise NotImplementedError

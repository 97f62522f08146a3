"""Every field of Atropos' configurations is there, under its name and with its default; none is only decoration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hermes_rl_mcp.envs import APIServerConfig, BaseEnvConfig

ENV_FIELDS = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_handling": "STOP_TRAIN",
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "batch_size": -1,
    "max_batches_offpolicy": 3,
    "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "thinking_mode": False,
    "reasoning_effort": None,
    "max_reasoning_tokens": None,
    "custom_thinking_prompt": None,
}
SERVER_FIELDS = {
    "timeout": 1200,
    "num_max_requests_at_once": 512,
    "num_requests_for_eval": 64,
    "model_name": "default",
    "rolling_buffer_length": 1000,
    "server_type": "openai",
    "tokenizer_name": "none",
    "api_key": "",
    "base_url": "",
    "n_kwarg_is_ignored": False,
    "health_check": True,
}


@pytest.mark.parametrize("name", ENV_FIELDS)
def test_a_field_of_atropos_environments_keeps_its_default(name: str) -> None:
    assert getattr(BaseEnvConfig(), name) == ENV_FIELDS[name]
    assert BaseEnvConfig.model_fields[name].description


@pytest.mark.parametrize("name", SERVER_FIELDS)
def test_a_field_of_atropos_servers_keeps_its_default(name: str) -> None:
    assert getattr(APIServerConfig(), name) == SERVER_FIELDS[name]
    assert APIServerConfig.model_fields[name].description


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_reasoning_tokens": 1023}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": 32001}, "max_reasoning_tokens"),
        ({"reasoning_effort": "maximal"}, "reasoning_effort"),
        ({"eval_handling": "PAUSE"}, "eval_handling"),
        ({"group_sise": 4}, "group_sise"),
        ({"worker_timeout": float("nan")}, "worker_timeout"),
    ],
    ids=["few_tokens", "many_tokens", "effort", "handling", "misspelt", "nan"],
)
def test_what_a_field_does_not_take_is_refused_by_its_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BaseEnvConfig(**fields)

"""What an environment can be told: Atropos' field names and defaults. A misspelt name is an error, never ignored."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EvalHandling(StrEnum):
    """What happens to training rollouts while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    """Running groups finish, no new ones start, then the evaluation has the sampler for itself."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """Training goes on with ``eval_limit_ratio`` of its groups in flight."""
    NONE = "NONE"
    """Both run at full speed."""


class BaseEnvConfig(BaseModel):
    """Fields every environment has. Subclass it to add your own; docstrings under fields are shown to the agent."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    group_size: int = Field(4, ge=1)
    """Completions sampled for one item and compared with each other; training needs at least 2."""
    max_num_workers: int = Field(-1, ge=-1)
    """Groups in flight at once. -1 = max_num_workers_per_node for each server."""
    max_eval_workers: int = Field(16, ge=1)
    """Evaluation samples in flight at once."""
    max_num_workers_per_node: int = Field(8, ge=1)
    """Groups in flight per server when max_num_workers is -1."""
    steps_per_eval: int = Field(100, ge=-1)
    """Trainer steps between evaluations. -1 or 0 = never."""
    max_token_length: int = Field(2048, ge=1)
    """Completion budget of one sampling call, in tokens."""
    eval_items: int = Field(-1, ge=-1, le=10_000)
    """Held-out items that base and adapter answer at the end, for results that say whether it improved. 0 = none. -1 =
    for about a tenth of what the run samples, at most 200; runs too short for 30 skip it. It ends unfinished after as
    long as the run took, at least 10 minutes."""
    eval_handling: EvalHandling = EvalHandling.STOP_TRAIN
    """What happens to training rollouts while an evaluation runs."""
    eval_limit_ratio: float = Field(0.5, ge=0, le=1)
    """Share of training groups that may be in flight during an evaluation under LIMIT_TRAIN."""
    inference_weight: float = 1.0
    """Weight of this environment among several on one rollout API."""
    batch_size: int = Field(-1, ge=-1)
    """Sequences per optimizer step; a multiple of group_size. -1 = what the trainer registered."""
    max_batches_offpolicy: int = Field(3, ge=0, le=1000)
    """Batches that may be in flight or queued beyond the one being trained, and so also the largest lag: no answer is
    trained on by a policy more than so many versions newer than the one that sampled it. 0 = on-policy: nothing is
    sampled for the next batch until the current one is trained. From 1 on sampling goes on meanwhile, where it can."""
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    """Hub id or folder of the tokenizer; must be the sampled model's."""
    use_wandb: bool = True
    """Weights & Biases for the run. The trainer does that; the environment's metrics go to env_metrics.jsonl."""
    rollout_server_url: str = "http://localhost:8000"
    """Address of the rollout API."""
    total_steps: int = Field(1000, ge=-1)
    """Trainer steps to make data for (serve), or groups to write (process). -1 = as many as the trainer registered."""
    wandb_name: str | None = None
    """Name under which the environment registers. Null = the environment's own name."""
    num_rollouts_to_keep: int = Field(32, ge=0)
    """Groups whose rollouts env_rollouts.jsonl in the run's directory shows, the newest ones (Atropos'
    ``train/rollouts``). What was trained on, step by step, is in rollouts.jsonl."""
    num_rollouts_per_group_for_logging: int = Field(1, ge=-1)
    """Rollouts of each such group. -1 = all."""
    ensure_scores_are_not_same: bool = True
    """Drop groups in which every score is equal."""
    data_path_to_save_groups: str | None = None
    """JSON lines file for scored groups, also while training; an existing file is never overwritten (``_1``, ``_2``,
    ...)."""
    data_dir_to_save_evals: str | None = None
    """Folder for metrics.json and samples.jsonl of evaluations."""
    min_items_sent_before_logging: int = Field(2, ge=0)
    """Groups that must have been sent since the last metrics line before a new one is written."""
    include_messages: bool = False
    """Send the conversation along with the tokens."""
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Smallest share of a batch that must come from this environment. Null = no minimum."""
    worker_timeout: float = Field(600, gt=0)
    """Seconds after which a group in flight is given up."""
    on_failed_rollout: Literal["replace", "shrink"] = "replace"
    """What becomes of a group when one of its rollouts fails. replace: it is sampled again, up to three times. shrink:
    the group goes out smaller, as long as two are left."""
    eval_timeout: float = Field(3600, gt=0)
    """Seconds after which an evaluation during training is given up; training goes on."""
    exploration_model: Literal["none", "item_value"] = "none"
    """How items are chosen. none: as the environment gives them. item_value: those that the policy gets right about
    half the time are preferred, as groups that are all right or all wrong teach nothing; for environments whose items
    come again."""
    exploration_rate: float = Field(0.1, ge=0, le=1)
    """Share of items that item_value leaves to the environment, so that none is given up for good."""
    thinking_mode: bool = False
    """Ask the model to reason first: an endpoint of type openai by its ``reasoning`` key, any other by a system prompt
    in front of what get_messages gives."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """How much, for endpoints of type openai; turns thinking_mode on."""
    max_reasoning_tokens: int | None = Field(None, ge=1024, le=32000)
    """The same as a number of tokens, for those that take it and have no effort given; turns thinking_mode on."""
    custom_thinking_prompt: str | None = None
    """Replaces the built-in system prompt of thinking_mode."""


class APIServerConfig(BaseModel):
    """One sampling endpoint."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    timeout: int = Field(1200, ge=1)
    """Seconds one sampling call may take, waiting for a busy or restarting server included."""
    num_max_requests_at_once: int = Field(512, ge=1)
    """Training requests in flight."""
    num_requests_for_eval: int = Field(64, ge=1)
    """Evaluation requests in flight."""
    model_name: str = "default"
    """Model name sent to OpenAI-compatible endpoints."""
    rolling_buffer_length: int = Field(1000, ge=1)
    """Requests whose times ``server/server_N_request_time_avg`` and its like are made of, the newest ones."""
    server_type: Literal["openai", "trl", "sglang", "vllm"] = "openai"
    """vllm and sglang: token-exact over /generate, with logprobs. openai and trl (``trl vllm-serve``; its address is
    base_url as it stands) give none: for process and evaluate only."""
    tokenizer_name: str = "none"
    """Original field; the environment's tokenizer_name is used."""
    api_key: str = ""
    """Bearer token. ``$NAME`` is read from the environment; empty with server_type openai = $OPENAI_API_KEY."""
    base_url: str = ""
    """Ends in /v1. /generate is asked at the same address without that suffix."""
    weight: float = 1.0
    """Original field."""
    n_kwarg_is_ignored: bool = False
    """The endpoint answers one completion whatever n says; ask n times."""
    health_check: bool = True
    """Original field; a server that is away is waited for at each call instead."""

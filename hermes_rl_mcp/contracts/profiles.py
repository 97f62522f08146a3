"""Locked fields, defaults and ceilings as data. The person who starts the server picks one; an agent cannot."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Profile(BaseModel):
    """One operator's policy over the flat field namespace (environment + server + trainer)."""

    model_config = ConfigDict(extra="forbid")

    name: str
    locked: dict[str, JsonValue] = Field(default_factory=dict)
    """Field to fixed value. Fields an environment does not have are ignored."""
    kept: list[str] = Field(default_factory=list)
    """Fields that stay as the environment's file has them: an agent cannot set them, whatever their value."""
    managed: dict[str, str] = Field(default_factory=dict)
    """Locked fields that the launcher fills in, with the sentence shown as their value."""
    defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Replaces the environment's own default where that field exists."""
    ceilings: dict[str, float] = Field(default_factory=dict)
    """Largest value an agent may set."""
    allowed_models: list[str] = Field(default_factory=list)
    """Shell patterns that ``model_name`` must match."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Shell patterns of hosts in the local network that a field may name. This machine's own needs no word."""
    status_interval_s: float = 1.0
    """Shortest time between two fresh answers of ``rl_check_status`` about one run."""

    def locked_names(self) -> set[str]:
        return {*self.locked, *self.managed, *self.kept}


_MANAGED = {
    "rollout_server_url": "set at start: the run's own rollout API on loopback",
    "base_url": "set at start: the run's own sampling endpoint on loopback",
    "api_key": "set at start",
    "checkpoint_dir": "set at start: the run directory",
    "wandb_name": "set at selection and start",
}

_NO_FOREIGN_CODE: dict[str, JsonValue] = {"trust_remote_code": False}
"""Only for environments that have such a field; our own programs never run a model's code."""

_THE_OPERATORS = ["mcp_servers", "docker_image", "docker_network"]
"""They name programs to start on this machine, and how far a container is shut off."""

LOCAL = Profile(
    name="local",
    kept=_THE_OPERATORS,
    managed={**_MANAGED, "tokenizer_name": "follows model_name", "server_type": "set at start"},
    locked={
        # The trainer, not the environment, sorts out groups without signal, so that reward/mean covers every group.
        "ensure_scores_are_not_same": False,
        **_NO_FOREIGN_CODE,
    },
    defaults={
        "model_name": "builtin:tiny",
        "lora_rank": 16,
        "learning_rate": 1e-4,
        "max_batches_offpolicy": 1,
        "format_weight": 0.1,
        "steps_per_eval": -1,
        "use_wandb": False,
    },
    ceilings={
        "total_steps": 10_000,
        "lora_rank": 128,
        "learning_rate": 1e-2,
        "max_token_length": 16_384,
        "max_token_trainer_length": 16_384,
        "group_size": 64,
        "batch_size": 1024,
        "max_batches_offpolicy": 32,
    },
    allowed_models=["builtin:*", "Qwen/*", "HuggingFaceTB/*", "meta-llama/*", "google/gemma*", "NousResearch/*"],
    status_interval_s=1.0,
)

HERMES = Profile(
    name="hermes",
    kept=_THE_OPERATORS,
    managed=_MANAGED,
    locked={
        "ensure_scores_are_not_same": False,
        **_NO_FOREIGN_CODE,
        "tokenizer_name": "Qwen/Qwen3-8B",
        "use_wandb": True,
        "max_token_length": 8192,
        "max_num_workers": 2048,
        "worker_timeout": 3600,
        "total_steps": 2500,
        "steps_per_eval": 25,
        "max_batches_offpolicy": 3,
        "inference_weight": 1.0,
        "eval_limit_ratio": 0.1,
        "model_name": "Qwen/Qwen3-8B",
        "weight": 1.0,
        "num_requests_for_eval": 256,
        "timeout": 3600,
        "server_type": "sglang",
        "lora_rank": 32,
        "learning_rate": 4e-5,
        "max_token_trainer_length": 9000,
        "save_checkpoint_interval": 25,
    },
    defaults={"group_size": 16, "batch_size": 128, "format_weight": 0.0, "wandb_project": "atropos-tinker"},
    allowed_models=["Qwen/Qwen3-8B"],
    status_interval_s=1800.0,
)

PROFILES = {profile.name: profile for profile in (LOCAL, HERMES)}

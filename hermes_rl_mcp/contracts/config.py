"""What one run is told: the resolved ``config.yaml`` that every process of the run reads.

The original's sections ``env``, ``openai`` (a list), ``slurm`` and ``testing`` are kept, so that an unmodified Atropos
environment can read the same file. ``trainer`` was called ``tinker`` there; that name is still accepted.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, model_validator

CLIP_THRESHOLDS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}
"""Losses that clip, with their own bounds of the ratio."""


class TrainerConfig(BaseModel):
    """Settings of the trainer process. Every field is visible to the agent; a profile may lock it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    backend: Literal["local"] = "local"
    """Who computes gradients: ``local`` is torch and peft in this process."""
    lora_rank: int = Field(32, ge=1, le=512)
    """Rank of the LoRA matrices on every linear layer (the output head is left alone)."""
    lora_alpha: float = Field(32.0, gt=0)
    """LoRA scale numerator: the adapter is multiplied by alpha / rank."""
    learning_rate: float = Field(4e-5, gt=0, le=1.0)
    """Adam step size; constant after warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly. 0 = none."""
    max_token_trainer_length: int = Field(9000, ge=2)
    """Longest sequence (prompt + completion, tokens) the trainer takes; longer ones are cut and counted."""
    checkpoint_dir: str = ""
    """Where checkpoints go. Empty = the run directory's ``checkpoints``."""
    save_checkpoint_interval: int = Field(25, ge=0)
    """Steps between checkpoints. 0 = only at the end."""
    keep_checkpoints: int = Field(3, ge=0)
    """How many of the newest checkpoints stay on disk. 0 = all."""
    loss_fn: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"] = "importance_sampling"
    """Policy loss, see ``trainer/backends/local/losses.py``: importance_sampling, ppo (clipped ratio), cispo (clipped
    weight), dro (squared log ratio), gspo (one ratio per sequence)."""
    clip_low_threshold: float | None = Field(None, ge=0)
    """Lowest ratio that ppo, cispo and gspo let through, absolute, at most 1. Null = the loss's own: 0.8, 0.0,
    0.9997."""
    clip_high_threshold: float | None = Field(None, gt=0)
    """Highest ratio, absolute, at least 1. Null = the loss's own: 1.2, 4.0, 1.0004."""
    dro_beta: float = Field(0.05, ge=0)
    """Weight of the squared log ratio in dro."""
    loss_reduction: Literal["token_mean", "token_sum", "seq_mean", "dr_grpo"] = "token_mean"
    """``token_mean`` divides by the trained tokens of the whole optimizer step; ``token_sum`` is Tinker's; ``seq_mean``
    averages each sequence, then the sequences; ``dr_grpo`` divides by sequences times max_token_length. Tokens and
    sequences of groups without signal do not count."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the distance from the base model (the adapter switched off), or from the ``ref_logprobs`` that a group
    brings. 0 = off. Groups without signal are skipped with this term, too: a batch of equal scores changes nothing."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that distance per token, with r the base's logprob minus the trainer's: -r, r squared / 2, or
    exp(r) - r - 1. In the loss k1 has no gradient on average, so take k2 or k3 there; on advantages k1 is the
    unbiased one."""
    kl_in: Literal["loss", "advantage"] = "loss"
    """Where it goes: a term of the loss, or a penalty on each token's advantage."""
    importance_correction: Literal["off", "truncate", "mask"] = "off"
    """What is done about a sampler whose logprobs differ from the trainer's: weigh by the ratio cut at importance_cap,
    or leave out what lies above the cap or below its inverse. The loss's own ratio is then against the trainer's
    logprobs and thus 1, so that ppo, cispo and gspo do not clip. Raw ratios are logged in any case."""
    importance_cap: float = Field(2.0, gt=1)
    """Largest weight of importance_correction."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether that ratio is each token's or the product over the sequence."""
    missing_logprobs: Literal["drop", "recompute"] = "drop"
    """Trainable tokens without a usable sampler logprob: left out, or taken as sampled by the current policy."""
    overlong: Literal["cut", "drop"] = "cut"
    """Sequences beyond max_token_trainer_length: cut on the right, or left out. Both are counted."""
    mask_truncated_completions: bool = False
    """Leave completions that ended by length out of the loss; their scores stay in the group's mean."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of a distillation term: the KL from the teacher whose ``distill_token_ids`` and ``distill_logprobs`` a
    group brings to the policy at temperature 1, over these candidates and all other tokens together. A group that
    brings them is trained on even if its scores are equal."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    grad_clip_norm: float = Field(1.0, ge=0)
    """Gradient norm above which gradients are scaled down. 0 = off."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does. The weights are never touched by it. ``stop`` saves them and fails
    the run; ``skip`` leaves the step out, with null in its metrics, until max_steps_without_signal are reached."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seeds LoRA initialisation and sampling. torch takes 64 bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes a GPU when torch sees one."""
    torch_threads: int = Field(0, ge=0, le=1024)
    """CPU threads of the trainer. 0 = all cores."""
    micro_batch_tokens: int = Field(2048, ge=64)
    """Padded tokens per forward pass while training; bounds memory, never changes the gradient."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass: far less memory, a third more
    time."""
    samples_in_flight: Literal["finish", "cut"] = "finish"
    """Completions that are under way when a training step is ready: they finish first, on their policy version, or are
    cut and end with ``length``."""
    sampler_max_rows: int = Field(64, ge=1)
    """Completions decoded together; further requests wait."""
    max_steps_without_signal: int = Field(10, ge=1)
    """Batches in a row without anything learned (equal scores, skipped steps) before the run fails with a diagnosis."""
    rollouts_logged_per_step: int = Field(4, ge=0)
    """Scored rollouts written to ``rollouts.jsonl`` per step."""
    use_wandb: bool = False
    """Also log to Weights & Biases. Local metrics are complete without it; a failing W&B never stops a run."""
    wandb_project: str = "hermes-rl"
    wandb_group: str | None = None
    wandb_run_name: str | None = None
    """Label of the run; set to ``<environment>-<run_id>`` at start when empty."""

    @model_validator(mode="after")
    def _fit_together(self) -> TrainerConfig:
        low, high = self.clip_low_threshold, self.clip_high_threshold
        own = CLIP_THRESHOLDS.get(self.loss_fn)
        if own is None:
            if low is not None or high is not None:
                raise ValueError(
                    f"loss_fn {self.loss_fn} does not clip: choose one of {', '.join(CLIP_THRESHOLDS)}, or leave "
                    "clip_low_threshold and clip_high_threshold null"
                )
        else:
            low, high = own[0] if low is None else low, own[1] if high is None else high
            if not (low <= 1.0 <= high and low < high):
                raise ValueError(
                    f"clip_low_threshold {low:g} and clip_high_threshold {high:g} are bounds of a ratio that begins at "
                    "1: the first must not be above it, the second not below, and they must differ"
                )
        if self.loss_fn == "dro" and self.importance_correction != "off":
            raise ValueError(
                "importance_correction takes away what dro is: its squared log ratio to the sampler would always be 0. "
                "Set it to off, or choose another loss_fn"
            )
        return self


class ServerEntry(BaseModel):
    """One inference endpoint, with the original's field names (APIServerConfig)."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    base_url: str
    """Ends in ``/v1``. Native calls (``/generate``) go to the same address without that suffix."""
    api_key: str = "x"
    server_type: Literal["openai", "vllm", "sglang", "trl"] = "vllm"
    weight: float = 1.0
    num_requests_for_eval: int = 256
    timeout: int = 3600


class RunSection(BaseModel):
    """Who this run is. Children take their run directory from where config.yaml lies."""

    model_config = ConfigDict(extra="forbid")

    run_id: str
    environment: str
    env_file: str
    env_class: str
    env_base: Literal["hermes_rl_mcp", "atroposlib"] = "hermes_rl_mcp"
    env_sha256: str
    """Hash of the environment file at start."""
    profile: str
    base_model: str
    """As the user named it: a Hub id, a local folder, ``builtin:tiny`` or ``builtin:smollm2-135m``."""
    model_path: str
    """What to load: the Hub id or folder; for ``builtin:`` names the folder into which the trainer puts it."""
    nonce: str
    """Every server of the run answers it on ``/health``; a stranger on the port cannot."""
    path_prefix: str
    """Secret first path component (no slashes) of the run's URLs; empty for a server started by hand."""


class Ports(BaseModel):
    rollout_api: int
    trainer: int


class RunConfig(BaseModel):
    """The whole of ``config.yaml``."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    run: RunSection
    ports: Ports
    env: dict[str, JsonValue]
    """Values for the environment's config class, by field name."""
    openai: list[ServerEntry]
    trainer: TrainerConfig = Field(validation_alias=AliasChoices("trainer", "tinker"))
    slurm: bool = False
    testing: bool = False

    @property
    def total_steps(self) -> int:
        return _as_int(self.env, "total_steps")

    @property
    def group_size(self) -> int:
        return _as_int(self.env, "group_size")

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step."""
        return _as_int(self.env, "batch_size")

    @property
    def max_token_length(self) -> int:
        return _as_int(self.env, "max_token_length")


def _as_int(values: dict[str, JsonValue], name: str) -> int:
    value: Any = values[name]
    return int(value)

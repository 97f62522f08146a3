"""Lines of ``metrics.jsonl``, ``env_metrics.jsonl`` and ``rollouts.jsonl``, and the marker of a finished checkpoint."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue

RECORDS_SCHEMA_VERSION = 1

METRIC_NAMES: dict[str, str] = {
    "train/loss": "policy loss of the optimizer step; null when the batch had no signal",
    "train/learning_rate": "Adam step size used",
    "train/grad_norm": "gradient norm before clipping",
    "train/adapter_max_abs": "largest absolute value in the LoRA B matrices",
    "reward/mean": "mean score over every scored rollout of the batch",
    "reward/std": "population standard deviation of those scores",
    "logprobs/mean": "mean sampler logprob of trained tokens, nats",
    "logprobs/mean_training": "mean trainer logprob of the same tokens before the step, nats",
    "logprobs/diff": "logprobs/mean - logprobs/mean_training",
    "advantages/mean": "mean advantage over trained tokens",
    "advantages/std": "population standard deviation of the advantage over trained tokens",
    "train/reward_mean": "same as reward/mean; the original's name",
    "train/percent_correct": "fraction of rollouts whose 'correct' part (else score) is above 0",
    "eval/percent_correct": "last evaluation by the environment, 0 to 1",
    "policy/version": "version of the adapter after the step; 0 = base",
    "policy/lag": "mean of (version before the step - version that sampled the rollout)",
    "groups/zero_variance_fraction": "groups whose scores are all equal",
    "rollouts/truncated_fraction": "completions that ended by length",
    "rollouts/length_mean": "mean trained tokens per completion",
    "time/step_s": "from the last step's end to this one's, seconds",
    "time/sample_s": "of that, spent sampling",
    "time/train_s": "of that, spent on forward, backward and the optimizer",
    "tokens/trained": "tokens that carried a gradient",
    "tokens/sampled_per_s": "sampled tokens per second of sampling",
}
"""Names in ``metrics.jsonl`` and in W&B. Parts of the reward come besides, as ``reward/<part>``. A line also has
``step`` (1 for the first batch the trainer took) and ``time`` (ISO 8601, UTC); NaN and infinity are written as null."""


class RolloutLine(BaseModel):
    """One scored rollout, as sampled. ``prompt`` and ``completion`` are untrusted text."""

    model_config = ConfigDict(extra="forbid")

    step: int
    group: int
    policy_version: int | None
    prompt: str
    completion: str
    reward: float
    reward_parts: dict[str, float] = Field(default_factory=dict)
    advantage: float
    """Mean over the completion's trained tokens."""
    tokens: int
    finish_reason: str | None


class StepProgress(BaseModel):
    """``progress.json``: what the trainer is doing within a step that takes long."""

    model_config = ConfigDict(extra="forbid")

    step: int
    """The step under way; the text is stale once ``metrics.jsonl`` has it."""
    text: str
    time: str


class WandbState(BaseModel):
    """``wandb.json``: how the optional copy to Weights & Biases stands."""

    model_config = ConfigDict(extra="ignore")

    state: str = "connecting"
    """connecting, online, offline, finished or failed."""
    url: str | None = None
    error: str | None = None
    """Begins with ``offline:`` when it is kept on this machine, to be sent later."""


class CheckpointMarker(BaseModel):
    """``complete.json``, written last into a checkpoint folder. A folder without it does not count."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = RECORDS_SCHEMA_VERSION
    step: int
    policy_version: int
    base_model: str
    base_sha256: str
    """Hash over the base model's weights (names, shapes, bytes)."""
    lora_rank: int
    files: dict[str, str]
    """Relative path to SHA-256."""
    created_at: str


class Preview(BaseModel):
    """One prompt of the run answered greedily by the base model and by the trained one."""

    prompt: str
    before: str
    after: str


class TrainerSummary(BaseModel):
    """``detail`` of the trainer's completion record."""

    model_config = ConfigDict(extra="forbid")

    steps: int
    policy_version: int
    adapter_path: str
    """Absolute folder that ``peft.PeftModel.from_pretrained`` loads."""
    base_model: str
    model_path: str
    reward_first5: float | None
    reward_last5: float | None
    preview: Preview | None = None
    extra: dict[str, JsonValue] = Field(default_factory=dict)

"""Lines of ``metrics.jsonl``, ``env_metrics.jsonl`` and ``rollouts.jsonl``, and the marker of a finished checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

RECORDS_SCHEMA_VERSION = 1

METRIC_NAMES: dict[str, str] = {
    "train/loss": "policy loss of the optimizer step; null when the batch had no signal",
    "train/learning_rate": "Adam step size used",
    "train/grad_norm": "gradient norm before clipping",
    "train/adapter_max_abs": "largest absolute value in the LoRA B matrices",
    "train/entropy": "mean entropy of the policy over trained tokens before the step, nats, at their temperature",
    "train/kl_reference": "mean k3 estimate of the distance from the base model; null unless kl_coef is set",
    "train/distill_kl": "mean distance from the teacher, nats, as distill_coef weighs it; null unless that is set",
    "train/clip_fraction": "trained tokens whose ratio the loss clipped, or importance_correction cut or left out",
    "ratio/mean": "mean of exp(trainer logprob - sampler logprob) over trained tokens, before any cap",
    "ratio/max": "largest of these ratios",
    "reward/mean": "mean score over every scored rollout of the batch",
    "reward/std": "population standard deviation of those scores",
    "logprobs/mean": "mean sampler logprob of trained tokens, nats",
    "logprobs/mean_training": "mean trainer logprob of the same tokens before the step, nats",
    "logprobs/diff": "logprobs/mean - logprobs/mean_training",
    "logprobs/mismatch_kl": "mean k3 estimate of the distance between sampler and trainer, nats; at policy/lag 0 that "
    "of their arithmetic alone",
    "advantages/mean": "mean advantage over trained tokens",
    "advantages/std": "population standard deviation of the advantage over trained tokens",
    "train/reward_mean": "same as reward/mean; the original's name",
    "train/percent_correct": "fraction of rollouts whose 'correct' part (else score) is above 0",
    "eval/percent_correct": "last evaluation by the environment, 0 to 1",
    "policy/version": "version of the adapter after the step; 0 = base",
    "policy/lag": "mean of (version before the step - version that sampled the rollout)",
    "groups/zero_variance_fraction": "groups whose scores are all equal",
    "rollouts/truncated_fraction": "completions that ended by length",
    "rollouts/overlong": "sequences beyond max_token_trainer_length, cut or left out",
    "rollouts/length_mean": "mean trainable tokens per completion, trained or not",
    "time/step_s": "from the last step's end to this one's, seconds; the first one begins with its first sample",
    "time/sample_s": "of that, spent on prefill, decoding and drawing; not on waiting for requests",
    "time/train_s": "of that, spent on forward, backward and the optimizer",
    "tokens/trained": "tokens that carried a gradient",
    "tokens/missing_logprobs": "trainable tokens without a usable sampler logprob, left out or recomputed",
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


class ArmScore(BaseModel):
    """One side of an evaluation."""

    model_config = ConfigDict(extra="forbid")

    accuracy: float
    """Mean score over the items, each 0 to 1 where the environment says what is correct."""
    low: float
    """95% interval."""
    high: float
    policy_version: int
    """Of the weights that answered; 0 = base."""


class Evaluation(BaseModel):
    """``evaluation.json``: base against adapter on the same held-out items with the same seed. Writer: environment."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["completed", "skipped", "failed"]
    reason: str = ""
    """Why it was skipped or failed."""
    step: int = 0
    items: int = 0
    """Different held-out items."""
    repeats: int = 1
    """Answers to each of them per side: more than one only where all held-out items there are were asked."""
    left_out: int = 0
    """Pairs of answers that could not be had or scored; they count on neither side."""
    seed: int = 0
    measure: str = "accuracy"
    """What is averaged: ``accuracy``, or ``score`` where the environment has no notion of correct."""
    base: ArmScore | None = None
    adapter: ArmScore | None = None
    difference: float | None = None
    """Mean over the items of adapter minus base."""
    low: float | None = None
    """95% interval of the difference, paired by item."""
    high: float | None = None
    verdict: str = ""
    """``improved by 0.21, 95% interval 0.12 to 0.30``, ``got worse by ...`` or ``no detectable change ...``."""
    seconds: float = 0.0
    time: str = ""


class ExportCheck(BaseModel):
    """What an export gives when stock libraries load it from disk, against the trainer's own logprobs (nats, fp32)."""

    model_config = ConfigDict(extra="forbid")

    tokens: int
    """Of the probe texts."""
    error_max: float
    """Largest difference from the trainer, over the tokens."""
    error_mean: float
    tolerance_max: float
    tolerance_mean: float
    moved_max: float
    """Largest difference from the base model: what training did."""
    moved_mean: float
    adapter_max_abs: float
    """Largest absolute value in the adapter's B matrices; 0 = nothing was learned."""


class ExportRecord(BaseModel):
    """``export.json`` in the folder that ``hermes-rl export`` makes."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = RECORDS_SCHEMA_VERSION
    run_id: str
    step: int
    policy_version: int
    format: Literal["adapter", "safetensors", "gguf"]
    """``adapter`` is a PEFT folder, the others are whole models."""
    dtype: str
    base_model: str
    base_sha256: str
    created_at: str
    check: ExportCheck
    note: str = ""
    """What the check could not cover."""
    files: dict[str, str]
    """Relative path to SHA-256."""


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

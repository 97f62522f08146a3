"""How much memory and disk a run takes, from its settings and the model's shape. Pure; the one place of these formulas.

The constants were fitted to runs of both built-in models; an earlier run on the same machine is the better source, and
``estimate`` prefers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from hermes_rl_mcp.contracts.estimates import Shape
from hermes_rl_mcp.contracts.evaluation import answers_wanted
from hermes_rl_mcp.contracts.runs import RunRequest

_MIB = 2**20
_TRAINER_BASE = 400 * _MIB
"""A Python process with torch, transformers and peft, and the sampler's HTTP server."""
_OTHERS = 150 * _MIB
"""Environment (with a tokenizer) and rollout API."""
_CUDA_CONTEXT = 600 * _MIB
_HEAD_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits that exist at a time (trainer.backends.local.head), fp32, in two copies."""
_KEPT_MARGIN = 1.3
"""What an allocator takes for the tensors that are kept, and small ones beside them."""
_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Padded prompt tokens per prefill pass (trainer.backends.local.engine)."""
_BYTES_PER_ADAPTER_PARAMETER = 12
"""In a checkpoint: the adapter and two Adam moments, fp32 each. In memory a gradient comes on top."""
_CHECKPOINT_FILES = 60_000
"""Markers, counters, random state, and what the environment keeps with each."""
_STEP_BYTES = 6_000
"""Lines of metrics, logs and sampled rollouts per step."""
_JOURNAL_BYTES_PER_TOKEN = 18
"""Token, mask and logprob of one token as JSON in the rollout journal."""
_ASSUMED_SHARE = 0.45
"""Of max_token_length that an answer takes where nobody knows better."""
_LONGEST_SHARE = 0.85
"""Of max_token_length that the mean of capped answers takes at most."""


@dataclass(frozen=True)
class Work:
    """What one step is made of."""

    prompt: int
    """Tokens of one prompt, about."""
    answer: float
    """Tokens of one answer on average."""
    longest: int
    """max_token_length."""
    group: int
    batch: int
    """Sequences per step."""
    steps: int
    """That are left to do."""
    rows: int
    """Answers that are sampled together."""
    evaluated: int = 0
    """Answers sampled at the end, base and adapter together."""

    @property
    def sampled_tokens(self) -> int:
        """Of one step."""
        return round(self.batch * self.answer)

    @property
    def groups(self) -> int:
        return max(1, self.batch // max(1, self.group))

    @property
    def trained_tokens(self) -> int:
        """Positions that go through the model when every group has a signal: each prompt once per group."""
        return round(self.groups * (self.prompt + self.group * self.answer))


def work_of(request: RunRequest, *, typical_prompt: int | None = None, typical_answer: int | None = None) -> Work:
    """``typical_*`` are the environment's own words; without them the answer's length is a share of its budget."""
    longest = max(1, number(request.env, "max_token_length", 256))
    group = max(1, number(request.env, "group_size", 8))
    batch = max(group, number(request.env, "batch_size", group))
    workers = number(request.env, "max_num_workers", -1)
    if workers <= 0:
        workers = max(1, number(request.env, "max_num_workers_per_node", 8))
    ahead = max(1, number(request.env, "max_batches_offpolicy", 1))
    steps = max(0, number(request.env, "total_steps", 1))
    per_side, _ = answers_wanted(number(request.env, "eval_items", -1), steps, batch)
    answer = longest * _ASSUMED_SHARE if typical_answer is None else min(typical_answer, longest * _LONGEST_SHARE)
    return Work(
        prompt=typical_prompt or min(512, max(16, longest)),
        answer=max(1.0, answer),
        longest=longest,
        group=group,
        batch=batch,
        steps=max(0, steps - (request.resume_step or 0)),
        rows=max(1, min(request.trainer.sampler_max_rows, workers * group, ahead * batch)),
        evaluated=2 * per_side,
    )


def memory_bytes(request: RunRequest, shape: Shape, work: Work) -> int:
    """Peak resident memory of the run's processes."""
    if request.device == "cuda":
        # The weights pass through host memory on their way to the GPU.
        return _TRAINER_BASE + _OTHERS + 2 * _CUDA_CONTEXT + 2 * shape.parameters
    return _TRAINER_BASE + _OTHERS + _model_bytes(request, shape, work, element=4)


def gpu_memory_bytes(request: RunRequest, shape: Shape, work: Work) -> int | None:
    """Peak GPU memory of the trainer; None on a CPU."""
    if request.device != "cuda":
        return None
    return _CUDA_CONTEXT + _model_bytes(request, shape, work, element=2)


def disk_bytes(request: RunRequest, shape: Shape, work: Work) -> int:
    """Run directory and logs at the end."""
    journal = work.steps * work.batch * (work.prompt + work.answer) * _JOURNAL_BYTES_PER_TOKEN
    checkpoints = checkpoints_kept(request, work.steps) * checkpoint_bytes(shape, request.trainer.lora_rank)
    return int(checkpoints + journal + work.steps * _STEP_BYTES + 100_000)


def checkpoint_bytes(shape: Shape, lora_rank: int) -> int:
    """Of one checkpoint."""
    return shape.adapter_parameters(lora_rank) * _BYTES_PER_ADAPTER_PARAMETER + _CHECKPOINT_FILES


def checkpoints_kept(request: RunRequest, steps: int) -> int:
    """How many lie there at the end."""
    interval = request.trainer.save_checkpoint_interval
    count = 1 + ((steps - 1) // interval if interval and steps > 0 else 0)
    keep = request.trainer.keep_checkpoints
    return min(count, keep) if keep else count


def activation_bytes(shape: Shape, element: int, *, checkpointing: bool = False) -> int:
    """Kept for the backward pass, per padded token of a pass in training: of every layer the inputs of its norms and
    matrices that cannot be made again (trainer.backends.local.recompute), and of one layer everything. With
    ``checkpointing`` of every layer its input alone."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 2 * (shape.hidden + queries + keys + shape.intermediate)
    whole = 8 * shape.hidden + 4 * (queries + keys) + 6 * shape.intermediate
    return round(_KEPT_MARGIN * element * (shape.layers * (shape.hidden if checkpointing else kept) + whole))


def _model_bytes(request: RunRequest, shape: Shape, work: Work, *, element: int) -> int:
    weights = element * shape.parameters
    adapter = 4 * 4 * shape.adapter_parameters(request.trainer.lora_rank)
    tokens = min(max(request.trainer.micro_batch_tokens, work.prompt + work.longest), _padded_tokens(work))
    logits = min(_HEAD_CHUNK[request.device], work.sampled_tokens * shape.vocabulary) * 4 * 2
    kept = activation_bytes(shape, element, checkpointing=request.trainer.gradient_checkpointing)
    training = tokens * kept + logits
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    prefixes = work.groups * work.prompt
    cache = (work.rows * (work.prompt + work.longest + 64) + prefixes) * per_token
    prefilled = min(_PREFILL_TOKENS[request.device], work.groups * work.prompt)
    prefill = prefilled * element * (8 * shape.hidden + 3 * shape.intermediate)
    sampling = 2 * cache + prefill + work.rows * shape.vocabulary * 4 * 3
    return weights + adapter + max(training, sampling)


def _padded_tokens(work: Work) -> int:
    return round(1.1 * work.trained_tokens)


def number(values: dict[str, JsonValue], name: str, default: int) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default

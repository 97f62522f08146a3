"""The model card: README.md with the header that the Hub reads, and what a person wants to know of trained weights.

Invariant: values of others (names, settings, an environment's words) stand in code spans or table cells on one line,
their markup taken away; no path of this machine and no key gets in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml
from pydantic import JsonValue

from hermes_rl_mcp.contracts.config import RunConfig
from hermes_rl_mcp.contracts.records import METRIC_NAMES, ArmScore, Evaluation, ExportRecord
from hermes_rl_mcp.untrusted import shown

_HUB_IDS = {"builtin:smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_TRAINER = (
    "loss_fn", "loss_reduction", "learning_rate", "warmup_steps", "lora_rank", "lora_alpha", "kl_coef",
    "importance_correction", "grad_clip_norm", "seed",
)  # fmt: skip
_ENVIRONMENT = ("group_size", "batch_size", "total_steps", "max_token_length")
_METRICS = (
    "reward/mean", "reward/std", "train/percent_correct", "eval/percent_correct", "train/entropy",
    "logprobs/mismatch_kl", "train/adapter_max_abs", "rollouts/length_mean", "rollouts/truncated_fraction",
)  # fmt: skip
_ENDS = 5
"""Steps at each end whose mean reward is told."""
_CELL = 80

Metrics = Mapping[str, Any]


def card(
    record: ExportRecord,
    config: RunConfig,
    steps: Sequence[Metrics],
    evaluation: Evaluation | None,
    weights_file: str = "",
) -> str:
    """``steps``: lines of metrics.jsonl up to the exported step. ``weights_file``: of a GGUF export."""
    parts = [
        f"---\n{yaml.safe_dump(_header(record), sort_keys=False, allow_unicode=True)}---",
        f"# {_text(record.base_model)} trained on {_text(config.run.environment)}",
        _about(record, config),
        _results(steps, evaluation, record.step),
        _use(record, weights_file),
        _settings(config),
        _checked(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(record: ExportRecord) -> dict[str, JsonValue]:
    base = _HUB_IDS.get(record.base_model, record.base_model)  # a relative: builtin weights were quantised
    library = {"adapter": "peft", "safetensors": "transformers", "gguf": "gguf"}[record.format]
    kind = {"adapter": "lora", "safetensors": "merged", "gguf": "gguf"}[record.format]
    header: dict[str, JsonValue] = {"library_name": library, "pipeline_tag": "text-generation"}
    if _is_hub_id(base):
        header |= {"base_model": base, "base_model_relation": "adapter" if record.format == "adapter" else "finetune"}
    return {**header, "tags": ["hermes-rl-mcp", "reinforcement-learning", "grpo", kind]}


def _about(record: ExportRecord, config: RunConfig) -> str:
    what = "A LoRA adapter" if record.format == "adapter" else "Base model and LoRA adapter merged into one model"
    return (
        f"{what}, {_text(record.dtype)}, from step {record.step} of a reinforcement learning run "
        f"({_text(record.run_id)}) with hermes-rl-mcp on the environment "
        f"{_text(config.run.environment)} (file with SHA-256 {_text(config.run.env_sha256[:12])}). Base model: "
        f"{_text(record.base_model)}, weights with the hash {_text(record.base_sha256[:12])}."
    )


def _results(steps: Sequence[Metrics], evaluation: Evaluation | None, step: int) -> str:
    lines = ["## Results"]
    if evaluation is not None and evaluation.status == "completed":
        lines += _evaluated(evaluation, step)
    rewards = [line["reward/mean"] for line in steps if isinstance(line.get("reward/mean"), int | float)]
    if rewards:
        count = min(_ENDS, len(rewards))
        lines.append(
            f"Mean reward in training: {fmean(rewards[:count]):.3f} in the first {count} steps, "
            f"{fmean(rewards[-count:]):.3f} in the last {count}."
        )
    last = steps[-1] if steps else {}
    rows = [
        (name, f"{last[name]:.4g}", METRIC_NAMES[name]) for name in _METRICS if isinstance(last.get(name), int | float)
    ]
    if rows:
        lines.append(_table((f"at step {step}", "", "meaning"), rows))
    return "\n\n".join(lines) if len(lines) > 1 else ""


def _evaluated(evaluation: Evaluation, step: int) -> list[str]:
    at = "" if evaluation.step == step else f" (measured at step {evaluation.step}, not at the exported {step})"
    rows = [
        (name, f"{arm.accuracy:.3f}", f"{arm.low:.3f} to {arm.high:.3f}")
        for name, arm in (("base model", evaluation.base), ("trained", evaluation.adapter))
        if isinstance(arm, ArmScore)
    ]
    measure = _text(evaluation.measure)
    return [
        f"On {evaluation.items} held-out items, base and trained model with the same seed{at}: "
        f"{_text(evaluation.verdict)}.",
        _table((measure, "mean", "95% interval"), rows),
    ]


def _use(record: ExportRecord, weights_file: str) -> str:
    if record.format == "gguf":
        return f"## Use\n\n```bash\nllama-server -m {weights_file}\n```"
    load = "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    ask = (
        'messages = [{"role": "user", "content": "2+3="}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))"
    )
    if record.format == "adapter":
        base, note = record.base_model, ""
        if not _is_hub_id(base):
            base = "FOLDER"
            note = f"\nFOLDER is that of the base model {_text(record.base_model)}"
            note += f": `python -m trainer.models {record.base_model}` names it." if _is_builtin(record) else "."
        code = (
            f"import torch\n{load}from peft import PeftModel\n\nbase = {base!r}\n"
            "model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)\n"
            'model = PeftModel.from_pretrained(model, ".")  # this folder\n'
            f"tokenizer = AutoTokenizer.from_pretrained(base)\n{ask}"
        )
        return f"## Use\n\n```python\n{code}\n```\n{note}"
    code = (
        f'{load}\nmodel = AutoModelForCausalLM.from_pretrained(".", dtype="auto")  # this folder\n'
        f'tokenizer = AutoTokenizer.from_pretrained(".")\n{ask}'
    )
    return f"## Use\n\n```python\n{code}\n```\n\nOr `hermes-rl serve FOLDER`, or any server that loads a Hub model."


def _settings(config: RunConfig) -> str:
    trainer = config.trainer.model_dump()
    rows = [(name, _text(trainer[name])) for name in _TRAINER if name in trainer]
    rows += [(name, _text(config.env[name])) for name in _ENVIRONMENT if name in config.env]
    return f"## Settings\n\n{_table(('setting', 'value'), rows)}"


def _checked(record: ExportRecord) -> str:
    check = record.check
    text = (
        "## Check\n\nLoaded from disk with stock libraries, these files give the trainer's logprobs on "
        f"{check.tokens} tokens of probe text to {check.error_mean:.2g} nats on average and {check.error_max:.2g} at "
        f"most (allowed: {check.tolerance_mean:g} and {check.tolerance_max:g}). From the base model they differ by "
        f"{check.moved_mean:.2g} on average and {check.moved_max:.2g} at most."
    )
    if check.adapter_max_abs == 0:
        text += " The adapter is zero: nothing was learned."
    return f"{text} {record.note}".rstrip() + " All figures and the files' hashes are in `export.json`."


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def _is_builtin(record: ExportRecord) -> bool:
    return record.base_model.startswith("builtin:")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: object) -> str:
    """Others' words as a code span on one line: nothing in it is markup, and a table's cell does not end in it."""
    plain = " ".join(shown(str(value), _CELL).split())
    return f"`{plain.replace('`', chr(39)).replace('|', '/')}`" if plain else "-"

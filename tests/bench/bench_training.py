"""The training part of a step against two plain implementations: ``bench_training.py [--rounds 3] [--threads N]``.

A group of 8 completions of 45 to 153 tokens to a prompt of 200, 843 tokens in all, SmolLM2-135M in fp32 with LoRA of
rank 16 on all linear layers. Measured is gradient computation, without the optimizer. The references are transformers
and peft as they come, with the whole group in one padded batch:
- full logits: padded to a multiple of 64, logits [B, T, V] and cross entropy;
- completion only: padded to the longest, the head on the completions' positions alone.
All must give the same gradient to 1e-4 of its norm, else the bench fails. Extra memory is peak RSS minus RSS after
the model was loaded and used once on a few tokens, each way in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import smollm2
from report import Report, cores, extra_memory, fresh, interleaved, progress

PROMPT, COMPLETIONS = 200, (45, 55, 63, 70, 77, 85, 95, 153)
OURS, CHECKPOINTED, FULL, SELECTED = "ours", "ours with gradient checkpointing", "full logits", "completion only"
BARS = {FULL: "<= 0.4", SELECTED: "<= 0.6"}
MASKED = -100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--model", type=Path, help="folder; SmolLM2-135M by default")
    parser.add_argument("--memory-of", choices=[OURS, CHECKPOINTED, FULL, SELECTED], help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, what = (options.model, str(options.model)) if options.model else smollm2()
    if options.memory_of:
        sys.stdout.write(json.dumps(_memory(folder, options.memory_of, options.threads)) + "\n")
        return 0
    note = f"{PROMPT} + {sum(COMPLETIONS)} tokens, {what}, {options.threads} threads"
    progress(f"training: {note}")
    report = Report()
    ways = _ways(folder, (OURS, CHECKPOINTED, FULL, SELECTED), options.threads)
    seconds = interleaved({name: _timed(way) for name, way in ways.items()}, options.rounds, warm_ups=1, label="train")
    expected = ways[FULL]()
    for name in (OURS, CHECKPOINTED, SELECTED):
        error = float((ways[name]() - expected).norm() / expected.norm())
        report.within(f"training, gradient of {name} against {FULL}", error, "of the norm", "<= 1e-4", note)
    del ways, expected
    for name, bar in BARS.items():
        report.compare(f"training against {name}", seconds[OURS], seconds[name], "s", bar, note)
    report.compare(f"training, {CHECKPOINTED}", seconds[CHECKPOINTED], seconds[OURS], "s", None, note)
    here = Path(__file__)
    memory = {
        name: fresh(here, "--memory-of", name, "--model", str(folder), threads=options.threads)["extra_mb"]
        for name in (OURS, CHECKPOINTED, FULL, SELECTED)
    }
    for name in (FULL, SELECTED):
        report.compare(f"training against {name}, extra memory", memory[OURS], memory[name], "MB", None, note)
    report.compare(f"training, {CHECKPOINTED}, extra memory", memory[CHECKPOINTED], memory[OURS], "MB", None, note)
    return report.exit_code


def _timed(way: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        way()
        return time.perf_counter() - start

    return seconds


def _memory(folder: Path, name: str, threads: int) -> dict[str, float]:
    (way,) = _ways(folder, (name,), threads).values()
    with extra_memory() as memory:
        way()
    return {"extra_mb": memory.extra / 1e6}


def _ways(folder: Path, names: tuple[str, ...], threads: int) -> dict[str, Callable[[], Any]]:
    """Each leaves no gradient behind and returns it, flat. One copy of the model for ours, one for the references."""
    from trainer.process import prepare

    prepare()
    import torch

    torch.set_num_threads(threads)
    batch, made = _batch(), {}
    if OURS in names or CHECKPOINTED in names:
        made |= _ours(folder, batch)
    if FULL in names or SELECTED in names:
        made |= _references(folder, batch)
    return {name: made[name] for name in names}


def _batch() -> list[tuple[list[int], list[float], float]]:
    """Tokens, sampler logprobs of the completion, advantage; of each sequence."""
    import random

    rng = random.Random(0)
    prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT)]
    batch = []
    for length in COMPLETIONS:
        completion = [rng.randrange(1000, 40_000) for _ in range(length)]
        batch.append((prompt + completion, [rng.uniform(-12.0, -10.0) for _ in completion], rng.gauss(0.0, 1.0)))
    return batch


def _fill_adapter(peft: Any) -> None:
    """The same numbers in every copy; B of zero would hide half of the gradient."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(peft.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (0.02 if "lora_B" in name else 0.04)
                )


def _gradient(peft: Any) -> Any:
    """Taken out of the model."""
    import torch

    named = sorted((name, parameter) for name, parameter in peft.named_parameters() if parameter.requires_grad)
    flat = torch.cat([parameter.grad.flatten() for _, parameter in named])
    peft.zero_grad(set_to_none=True)
    return flat


def _ours(folder: Path, batch: list[tuple[list[int], list[float], float]]) -> dict[str, Callable[[], Any]]:
    import numpy as np
    import torch

    from trainer.backends.base import Datum
    from trainer.backends.local.model import load
    from trainer.backends.local.train import Learner
    from trainer.backends.training import LossSettings

    model = load(folder, device=torch.device("cpu"), rank=16, alpha=32.0, seed=0, progress=lambda _: None)
    _fill_adapter(model.peft)
    data = []
    for tokens, sampled, advantage in batch:
        trained = np.arange(len(tokens)) >= PROMPT
        logprobs = np.array([0.0] * PROMPT + sampled, np.float32)
        advantages = np.where(trained, np.float32(advantage), np.float32(0.0))
        data.append(Datum(0, np.array(tokens), trained, logprobs, advantages, 1.0, np.zeros_like(trained)))

    def way(checkpointing: bool) -> Callable[[], Any]:
        learner = Learner(model, micro_batch_tokens=2048, gradient_checkpointing=checkpointing)

        def run() -> Any:
            learner.forward_backward(data, LossSettings())
            return _gradient(model.peft)

        return run

    return {OURS: way(False), CHECKPOINTED: way(True)}


def _references(folder: Path, batch: list[tuple[list[int], list[float], float]]) -> dict[str, Callable[[], Any]]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()
    _fill_adapter(peft)
    total = sum(COMPLETIONS)
    with torch.no_grad():
        peft(input_ids=torch.tensor([[1, 2, 3]]))  # pages of a mapped file count once they were read

    def padded(multiple: int) -> tuple[Any, ...]:
        longest = max(len(tokens) for tokens, _, _ in batch)
        length = -(-longest // multiple) * multiple
        ids, mask = torch.zeros(2, len(batch), length, dtype=torch.long)
        labels = torch.full((len(batch), length), MASKED)
        sampled, advantages = torch.zeros(2, len(batch), length)
        for at, (tokens, logprobs, advantage) in enumerate(batch):
            ids[at, : len(tokens)], mask[at, : len(tokens)] = torch.tensor(tokens), 1
            labels[at, PROMPT : len(tokens)] = torch.tensor(tokens[PROMPT:])
            sampled[at, PROMPT : len(tokens)] = torch.tensor(logprobs)
            advantages[at, PROMPT : len(tokens)] = advantage
        return ids, mask, labels[:, 1:], sampled[:, 1:], advantages[:, 1:]

    def loss(logprobs: Any, sampled: Any, advantages: Any) -> Any:
        return -(torch.exp(logprobs - sampled) * advantages).sum() / total

    def full_logits() -> Any:
        ids, mask, labels, sampled, advantages = padded(64)
        logits = peft(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        entropy = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="none"
        )
        trained = labels != MASKED
        loss(-entropy.view_as(labels)[trained], sampled[trained], advantages[trained]).backward()
        return _gradient(peft)

    def completion_only() -> Any:
        ids, mask, labels, sampled, advantages = padded(1)
        hidden = base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
        trained = labels != MASKED
        logprobs = torch.log_softmax(base.lm_head(hidden[trained]), -1)
        chosen = logprobs.gather(1, labels[trained][:, None])[:, 0]
        loss(chosen, sampled[trained], advantages[trained]).backward()
        return _gradient(peft)

    return {FULL: full_logits, SELECTED: completion_only}


if __name__ == "__main__":
    sys.exit(main())

"""A child of the benches: our trainer, one group sampled and trained on at each turn, with the real loop and backend.

    step_ours.py MODEL --prompt-tokens 200 --group 8 --new-tokens 100 --threads 2

Answers: ``{"s", "sample_s", "after_sampling_s", "extra_bytes", ...}`` per turn. No token ends a completion, so that all
are equally long. With ``--without-signal`` every second turn is the group of the turn before with equal scores, not
sampled anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models import prompt
from report import Memory, extra_memory
from workers import turns

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.rollout_api import ScoredData
from trainer.process import prepare
from trainer.rollout_client import Lease

MASKED, NO_LOGPROB = -100, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without-signal", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    options = parser.parse_args()
    wait, answer = turns()
    prepare()
    import torch

    from trainer.backends.local.backend import LocalBackend
    from trainer.backends.local.model import load

    torch.set_num_threads(options.threads)
    config = TrainerConfig(
        lora_rank=options.rank,
        lora_alpha=2.0 * options.rank,
        learning_rate=1e-5,
        device="cpu",
        torch_threads=options.threads,
        save_checkpoint_interval=0,
        max_steps_without_signal=1000,
        gradient_checkpointing=options.checkpointing,
    )
    model = load(
        options.model,
        device=torch.device("cpu"),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        seed=0,
        progress=lambda _: None,
    )
    backend = LocalBackend(dataclasses.replace(model, eos_ids=frozenset()), config)
    _, ids = prompt(model.tokenizer, options.prompt_tokens)
    with tempfile.TemporaryDirectory() as folder, extra_memory() as memory:
        source = _Source(backend, ids, options, wait, answer, memory)
        answer({"ready": True})
        _loop(Path(folder), backend, source, config, options.new_tokens).run()
    backend.close()


def _loop(folder: Path, backend: Any, source: _Source, config: TrainerConfig, max_tokens: int) -> Any:
    from trainer.checkpoints import Checkpoints
    from trainer.loop import Loop, Recorders
    from trainer.metrics import JsonLines, LastEvaluation
    from trainer.progress import ProgressFile

    recorders = Recorders(
        JsonLines(folder / "metrics.jsonl"),
        JsonLines(folder / "rollouts.jsonl"),
        LastEvaluation(folder / "env_metrics.jsonl"),
        source.recorded,
        ProgressFile(folder / "progress.json"),
    )
    checkpoints = Checkpoints(folder / "checkpoints", backend, base_model="bench", lora_rank=config.lora_rank)
    return Loop(
        config,
        backend,
        source,
        checkpoints,
        recorders,
        total_steps=10**6,
        max_token_length=max_tokens,
        stopping=lambda: source.over,
    )


class _Source:
    """Batches for the loop: a turn begins in ``next_batch`` and ends in ``acknowledge``."""

    def __init__(
        self,
        backend: Any,
        ids: list[int],
        options: argparse.Namespace,
        wait: Callable[[], bool],
        answer: Callable[[Mapping[str, object]], None],
        memory: Memory,
    ) -> None:
        self.over = False
        self._backend = backend
        self._ids = ids
        self._options = options
        self._wait = wait
        self._answer = answer
        self._memory = memory
        self._turn = 0
        self._last: ScoredData | None = None
        self._began = self._sampled = 0.0
        self._sampling_bytes = 0
        self._train_s: float | None = None

    def next_batch(self) -> Lease | None:
        if not self._wait():
            self.over = True
            return None
        self._turn += 1
        self._began = time.perf_counter()
        if self._options.without_signal and self._turn % 2 == 0 and self._last is not None:
            group = self._last.model_copy(update={"scores": [1.0] * self._options.group})
        else:
            group = self._last = self._sample()
        self._sampled = time.perf_counter()
        self._sampling_bytes = self._memory.so_far().extra
        return Lease([group], str(self._turn))

    def recorded(self, step: int, values: Mapping[str, float | None]) -> None:
        self._train_s = values["time/train_s"]

    def acknowledge(self, lease: Lease) -> None:
        now = time.perf_counter()
        self._answer(
            {
                "s": now - self._began,
                "sample_s": self._sampled - self._began,
                "after_sampling_s": now - self._sampled,
                "train_s": self._train_s,
                "extra_bytes": self._memory.so_far().extra,
                "extra_bytes_before_training": self._sampling_bytes,
            }
        )

    def checkpointed(self, step: int) -> None:
        """Nothing is kept."""

    def _sample(self) -> ScoredData:
        from trainer.backends.base import SampleRequest

        size, new = self._options.group, self._options.new_tokens
        request = SampleRequest(tuple(self._ids), n=size, max_tokens=new)
        completions = self._backend.submit(request).result().completions
        assert all(len(completion.token_ids) == new for completion in completions)
        count = len(self._ids)
        return ScoredData(
            tokens=[self._ids + completion.token_ids for completion in completions],
            masks=[[MASKED] * count + completion.token_ids for completion in completions],
            scores=[float(number) for number in range(size)],
            inference_logprobs=[[NO_LOGPROB] * count + completion.logprobs for completion in completions],
            generation_params={"temperature": 1.0},
        )


if __name__ == "__main__":
    main()

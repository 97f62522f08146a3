"""A child of the benches: TRL's GRPOTrainer, one step at each turn, with plain transformers generation.

    step_trl.py MODEL --prompt-tokens 200 --group 8 --new-tokens 100 --threads 2 [--no-checkpointing]

Answers: ``{"s", "sample_s", "extra_bytes"}`` per turn. Completions are held to one length; scores differ within the
group. What is not named here is TRL's default.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from models import prompt
from report import extra_memory
from workers import turns

_STEPS = 10**6


class _Over(Exception):
    """No further turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-checkpointing", action="store_true")
    options = parser.parse_args()
    wait, answer = turns()
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    text, _ = prompt(tokenizer, options.prompt_tokens)
    sampled = [0.0]

    class Timed(GRPOTrainer):  # type: ignore[misc]  # trl has no types
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return super()._generate(*args, **kwargs)
            finally:
                sampled[0] = time.perf_counter() - began

    def scores(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == options.new_tokens for ids in completion_ids)
        return [float(number) for number in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=options.group,
            num_generations=options.group,
            max_completion_length=options.new_tokens,
            generation_kwargs={"min_new_tokens": options.new_tokens},
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_steps=_STEPS,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **({"gradient_checkpointing": False} if options.no_checkpointing else {}),
        )
        trainer = Timed(
            model=model,
            reward_funcs=scores,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": text}]),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=options.rank,
                lora_alpha=2 * options.rank,
                lora_dropout=0.0,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
        )
        with extra_memory() as memory:

            class Turns(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
                began = 0.0

                def on_step_begin(self, *_: Any, **__: Any) -> None:
                    if not wait():
                        raise _Over
                    self.began = time.perf_counter()

                def on_step_end(self, *_: Any, **__: Any) -> None:
                    took = time.perf_counter() - self.began
                    answer({"s": took, "sample_s": sampled[0], "extra_bytes": memory.so_far().extra})

            trainer.add_callback(Turns())
            answer({"ready": True})
            try:
                trainer.train()
            except _Over:
                return


if __name__ == "__main__":
    main()

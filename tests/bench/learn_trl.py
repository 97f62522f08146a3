"""A child of ``learning.py``: TRL's GRPOTrainer on one of its tasks, for so many seconds of training.

    learn_trl.py TASK MODEL --seed 0 --seconds 60 --group 8 --batch 64 --limit 12 --rate 1e-3 --rank 16 --alpha 32

One JSON object per step on stdout: ``{"s", "reward", "length"}``, seconds since training began. Prompts and rewards are
the environment's own; synchronous, one optimizer step per batch, constant learning rate; else TRL's defaults, in fp32.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers import turns

sys.path.insert(0, str(Path(__file__).parent / "learning_envs"))

Reward = Callable[[Any, str, list[int], bool], float]
"""Of the item, the answer's text, its tokens, and whether the model ended it itself."""
_ITEMS = 20_000


def task(name: str, seed: int, limit: int) -> tuple[list[str], list[Any], Reward]:
    """Questions, what they are about, and the reward, as the environment of that name has them."""
    if name == "shorter":
        import shorter

        asked = shorter.questions(seed, _ITEMS)
        return asked, [None] * _ITEMS, lambda item, text, ids, ended: shorter.reward(len(ids), limit)
    from environments import arithmetic

    rng = random.Random(seed)
    problems = [arithmetic.draw(rng, 1) for _ in range(_ITEMS)]

    def grade(item: Any, text: str, ids: list[int], ended: bool) -> float:
        return arithmetic.grade(item, text, "stop" if ended else "length").value

    return [problem.text for problem in problems], problems, grade


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["arithmetic", "shorter"])
    parser.add_argument("model", type=Path)
    for name in ("seed", "group", "batch", "limit", "rank", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("seconds", "rate", "alpha"):
        parser.add_argument(f"--{name}", type=float, required=True)
    options = parser.parse_args()
    _, answer = turns()
    warnings.filterwarnings("ignore")
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    asked, items, reward = task(options.task, options.seed, options.limit)
    last: dict[str, float] = {}

    def scores(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        found = []
        for ids, at in zip(completion_ids, number, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            found.append(reward(items[at], text, ids, ids[-1] in trainer.eos_token_ids))
        last["reward"] = sum(found) / len(found)
        last["length"] = sum(map(len, completion_ids)) / len(completion_ids)
        return found

    class Record(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.began
            answer({"s": seconds, **last})
            control.should_training_stop = seconds >= options.seconds

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            seed=options.seed,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=options.batch,
            num_generations=options.group,
            max_completion_length=options.limit,
            learning_rate=options.rate,
            lr_scheduler_type="constant",
            max_steps=10**6,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = [{"prompt": [{"role": "user", "content": text}], "number": number} for number, text in enumerate(asked)]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=scores,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=options.rank,
                lora_alpha=options.alpha,
                lora_dropout=0.0,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[Record()],
        )
        trainer.train()


if __name__ == "__main__":
    main()

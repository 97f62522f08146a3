"""A model folder for tests: small, quick, and taught by supervision a handful of answers that an environment rewards.

What is sampled from it then is one of those answers, whatever is asked. An untrained model would never be rewarded, and
one that ships with the product knows no answer format of an environment that somebody else wrote.

    python -m tests.taught_model --out DIR --tokenizer DIR --answers FILE.json [--prompt-bytes 1200] [--steps 150]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

CONTEXT = 4096
HIDDEN = 64
LAYERS = 2
LEARNING_RATE = 5e-3
SEQUENCES = 4
"""Per step."""
SHORTEST = 30
"""Bytes of a prompt."""


def teach(out: Path, tokenizer_folder: Path, answers: list[str], *, prompt_bytes: int, steps: int) -> float:
    """Writes the folder; the last loss in nats per token. ``prompt_bytes``: of the longest prompts, about."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    choice = random.Random(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    loss_value = float("inf")
    for step in range(steps):
        length = round(SHORTEST * (prompt_bytes / SHORTEST) ** choice.random())  # mostly short, which is quick
        prompt = "".join(chr(choice.randint(32, 122)) for _ in range(length))
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        rows = [
            [*tokenizer.encode(choice.choice(answers), add_special_tokens=False), tokenizer.eos_token_id]
            for _ in range(SEQUENCES)
        ]
        longest = max(map(len, rows))
        ids_BT = torch.tensor([head + row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        labels_BT = torch.tensor([[-100] * len(head) + row + [-100] * (longest - len(row)) for row in rows])
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss_value = float(loss.detach())
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for file in tokenizer_folder.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            shutil.copy(file, out / file.name)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": CONTEXT}))
    return loss_value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("out", "tokenizer", "answers"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--prompt-bytes", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    texts = json.loads(given.answers.read_text())
    loss = teach(given.out, given.tokenizer, texts, prompt_bytes=given.prompt_bytes, steps=given.steps)
    sys.stdout.write(f"{loss:.3f}\n")

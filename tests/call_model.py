"""A model small enough to train within a test that calls tools: ``builtin:tiny`` taught two calls by heart.

An untrained model never makes a call by chance, so reinforcement would have nothing to go on. This one is taught by
supervision to answer one prompt with either of two calls, alike often, and is right with one of them: which it shall
make is left to reinforcement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trainer.models.tokenizer import CHAT_TEMPLATE, build_tokenizer, save_tokenizer

TINY = Path(__file__).parent.parent / "trainer" / "models" / "tiny"
PARSER = "mistral"
"""Its form of a call is the shortest."""
LEARNING_RATE, STEPS = 2e-3, 150


def make(folder: Path, prompt: str, commands: Sequence[str]) -> float:
    """Writes model and tokenizer; returns the last loss. ``commands`` for the terminal are of the same length."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    # The tools are not told: the model knows the one it needs. That the template names them says that it takes them.
    tokenizer.chat_template = "{#- tools are known -#}" + CHAT_TEMPLATE
    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokens_BT, mine_BT = _examples(tokenizer, prompt, commands)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10, 2 * (1 - step / STEPS))
        optimizer.zero_grad()
        logits = model(input_ids=tokens_BT).logits[:, :-1]
        losses_BT = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens_BT[:, 1:], reduction="none")
        loss = (losses_BT * mine_BT[:, 1:]).sum() / mine_BT[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    folder.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return float(loss.item())


def _examples(tokenizer: Any, prompt: str, commands: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for command in commands:
        call = f"[TOOL_CALLS]terminal{json.dumps({'command': command})}"
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": call}]
        rows.append(tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True))
    tokens_BT = torch.tensor([row["input_ids"] for row in rows])
    return tokens_BT, torch.tensor([row["assistant_masks"] for row in rows], dtype=torch.float32)

"""The model that is measured: SmolLM2-135M-Instruct where it can be had, else random weights of the same shape.

Files lie under ``build/models`` and are made once. Speed and memory of the two are alike; learning needs the real one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from report import ROOT, progress

from hermes_rl_mcp.errors import HermesRLError
from trainer.models.materialise import materialise

FOLDER = ROOT / "build" / "models"
NAME = "builtin:smollm2-135m"
_VOCABULARY = 49_152


def smollm2() -> tuple[Path, str]:
    """Its folder, and what it is in words."""
    try:
        return materialise(NAME, FOLDER / "smollm2-135m", progress), "SmolLM2-135M-Instruct"
    except HermesRLError as error:
        progress(f"{NAME} cannot be had ({error}); taking random weights of its shape")
        return _random(FOLDER / "random-135m"), "random weights of SmolLM2-135M's shape"


def prompt(tokenizer: Any, length: int) -> tuple[str, list[int]]:
    """A text of exactly so many tokens, and the tokens."""
    ids: list[int] = tokenizer(" ".join(f"w{number}" for number in range(length)))["input_ids"][:length]
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if tokenizer(text)["input_ids"] != ids or len(ids) != length:
        raise RuntimeError("the tokenizer does not give back the tokens of its own text")
    return text, ids


def _random(folder: Path) -> Path:
    if (folder / "complete").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(_VOCABULARY - 2)} | {
        "<end>": _VOCABULARY - 2,
        "<unknown>": _VOCABULARY - 1,
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=_VOCABULARY,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_VOCABULARY - 2,
        pad_token_id=_VOCABULARY - 2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "complete").touch()
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{smollm2()}\n")

"""The tiny model's tokenizer: one token per UTF-8 byte, and single tokens for the turns of a chat.

Invariant: every text without special tokens decodes to itself, and its ids are its byte values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (PAD, END, *ROLES)
PAD_ID = 256
END_ID = 257
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)
CONTEXT_LENGTH = 512

# Three tokens around a question and no line breaks: short prompts keep training on two cores quick.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, by byte value.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def build_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast``: byte values are ids 0 to 255, special tokens follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **_settings())


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that older readers (and engines built on them) do not know.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_settings()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _settings() -> dict[str, Any]:
    return {
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "padding_side": "left",
    }

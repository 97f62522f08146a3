"""The tokenizer of the sampled model, loaded without torch where its files allow that, and a chat template for all.

Invariant: text is rendered first and encoded once, so that what is sent as ids is what the template wrote.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl_mcp.envs.trajectory import Message
from hermes_rl_mcp.errors import MissingExtraError, PreflightError
from hermes_rl_mcp.paths import Home

log = logging.getLogger(__name__)

PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token or '' }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Installed when a tokenizer has none (base models): each turn on its own line, ended by the end-of-sequence token."""


def load_tokenizer(name: str) -> Any:
    """A transformers tokenizer with a chat template. ``name`` is a Hub id, a folder, or ``builtin:NAME``."""
    source = str(Home.from_environ(os.environ).model_dir(name)) if name.startswith("builtin:") else name
    hint = "Set tokenizer_name to a folder that has tokenizer.json, or to a Hub id this machine can reach."
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise PreflightError(f"The tokenizer '{name}' is not there: no folder {source}.", hint=hint)
    try:
        tokenizer = _load(source)
    except ImportError as error:
        raise MissingExtraError("An environment that samples", "train") from error
    except (OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PreflightError(
            f"The tokenizer '{name}' could not be loaded: {first_line}",
            hint=hint,
        ) from error
    if not tokenizer.chat_template:
        log.warning("the tokenizer %s has no chat template; a plain one is used", name)
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    return tokenizer


def _load(source: str) -> Any:
    # AutoTokenizer imports torch (2 s, 300 MB) to look at the model's config; a tokenizer.json does without.
    if (Path(source) / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(source, trust_remote_code=False)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


_MARKS = {"<think>": "\ue0f1think\ue0f2", "</think>": "\ue0f1end of think\ue0f2"}
"""What stands for the tags while a template is at work; private characters, which no text has."""


def _hidden(message: Message) -> Message:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for tag, mark in _MARKS.items():
        content = content.replace(tag, mark)
    return {**message, "content": content}


class Renderer:
    """Messages to text to ids and back, always in that order."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        preserve_think_blocks: bool = False,
    ) -> str:
        """The text after which the model writes the next assistant turn. ``preserve_think_blocks``: many templates drop
        the thoughts of earlier turns; they then stay as they were written."""
        shown = [_hidden(one) for one in messages] if preserve_think_blocks else list(messages)
        text = self.tokenizer.apply_chat_template(
            shown, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
        )
        for tag, mark in _MARKS.items() if preserve_think_blocks else ():
            text = text.replace(mark, tag)
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template wrote the special tokens itself."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, special: bool) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

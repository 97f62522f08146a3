"""Sequences with their tokens."""

from types import SimpleNamespace
from typing import Any


class ManagedServer:
    def __init__(self, server: Any, tokenizer: Any = None, preserve_think_blocks: bool = False) -> None:
        self.server, self.tokenizer = server, tokenizer
        self.current_nodes: list[Any] = []

    def _convert_messages_to_prompt(self, messages: Any, tools: Any = None) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _find_extending_node(self, input_text: str) -> Any:
        return next((one for one in self.current_nodes if input_text.startswith(one.full_text)), None)

    def _compute_input_ids(self, input_text: str, extending_node: Any) -> list[int]:
        rest = input_text[len(extending_node.full_text) :] if extending_node else input_text
        before = extending_node.tokens if extending_node else []
        return [*before, *self.tokenizer.encode(rest, add_special_tokens=False)]

    def _create_sequence_node(
        self,
        prompt: str,
        parent: Any,
        prompt_ids: list[int],
        ids: list[int],
        logprobs: Any,
        text: str,
        reason: str,
        old: Any,
    ) -> Any:
        masks = old.masked_tokens if old else []
        before = old.logprobs if old else []
        return SimpleNamespace(
            full_text=prompt + text,
            tokens=prompt_ids + ids,
            masked_tokens=[*masks, *[-100] * (len(prompt_ids) - len(masks)), *ids],
            logprobs=[*before, *[1.0] * (len(prompt_ids) - len(before)), *logprobs],
            metadata={"finish_reason": reason},
        )

    async def chat_completion(self, **kwargs: Any) -> Any:
        prompt = self._convert_messages_to_prompt(kwargs.pop("messages"))
        old = self._find_extending_node(prompt)
        asked = self._compute_input_ids(prompt, old)
        reply = await self.server.tokens_and_logprobs_completion(**kwargs, input_ids=asked)
        prompt_ids, several, logprobs, reasons = reply
        self.current_nodes = [one for one in self.current_nodes if one is not old]
        choices = []
        for ids, values, reason in zip(several, logprobs, reasons, strict=True):
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            node = self._create_sequence_node(prompt, None, prompt_ids, ids, values, text, reason, old)
            self.current_nodes.append(node)
            choices.append(SimpleNamespace(finish_reason=reason, message=SimpleNamespace(content=text)))
        return SimpleNamespace(choices=choices)

    def get_state(self) -> dict[str, Any]:
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        self.current_nodes.clear()

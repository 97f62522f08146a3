"""The formats in which families of models write tool calls. Facts about each stand at its class."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hermes_rl_mcp.agent.interfaces import ToolCall
from hermes_rl_mcp.agent.parsers.blocks import (
    Block,
    BlockParser,
    arguments_of,
    arguments_text,
    call_of,
    json_text,
    new_id,
    plain_text,
    read_json,
    read_name,
    skip_space,
    value_of,
)

Types = Mapping[str, Mapping[str, str]]

BARE_ATTEMPTS = 200
"""Opening braces that llama's parser looks behind; a text of nothing else must not take quadratic time."""
MISTRAL_ID_CHARS = 9


def _object(call: ToolCall, key: str = "arguments") -> str:
    return f'{{"name": {json_text(call.name)}, "{key}": {call.arguments}}}'


class HermesParser(BlockParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``; the last tag may be unclosed."""

    name = "hermes"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def read(self, text: str, start: int, types: Types) -> Block:
        opener, closer = self.openers[0], self.closers[0]
        position, calls = start + len(opener), list[ToolCall]()
        try:
            while True:
                value, position = read_json(text, position)
                calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
                if text[skip_space(text, position) : skip_space(text, position) + 1] != "{":
                    break
        except ValueError as error:
            block = self.damaged(text, max(start, position - 1) if calls else start, str(error).split(":")[0])
            return replace(block, calls=calls)
        close, following = text.find(closer, position), text.find(opener, position)
        if close >= 0 and (following < 0 or close < following):
            gap = text[position:close]
            if len(gap.strip()) <= 2:  # a brace too many
                return Block(close + len(closer), calls)
        return Block(position, calls)

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"{self.openers[0]}\n{_object(call)}\n{self.closers[0]}" for call in calls)


class QwenParser(HermesParser):
    """As hermes."""

    name = "qwen"


class LongcatParser(HermesParser):
    """As hermes, with its own tags."""

    name = "longcat"
    openers = ("<longcat_tool_call>",)
    closers = ("</longcat_tool_call>",)


class MistralParser(BlockParser):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`` (old) or ``[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}`` (v11 and
    later, ``[ARGS]`` between name and arguments where the tokenizer writes it). Ids have 9 letters and digits."""

    name = "mistral"
    openers = ("[TOOL_CALLS]",)

    def read(self, text: str, start: int, types: Types) -> Block:
        position = skip_space(text, start + len(self.openers[0]))
        try:
            if text[position : position + 1] in ("[", "{"):
                value, end = read_json(text, position)
                found = [(one, call_of(one)) for one in (value if isinstance(value, list) else [value])]
                return Block(end, [replace(call, id=self._id(one)) for one, call in found])
            name = read_name(text, position)
            if not name:
                raise ValueError("no name")
            position += len(name)
            if match := re.compile(r"\s*(\[CALL_ID\][a-zA-Z0-9]{9})?\s*(\[ARGS\])?").match(text, position):
                position = match.end()
            value, end = read_json(text, position)
            return Block(end, [ToolCall(self._id(None), name, arguments_text(value))])
        except ValueError as error:
            return self.damaged(text, start, str(error).split(":")[0])

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"[TOOL_CALLS]{call.name}{call.arguments}" for call in calls)

    @staticmethod
    def _id(value: Any) -> str:
        given = value.get("id") if isinstance(value, dict) else None
        if isinstance(given, str) and re.fullmatch(r"[a-zA-Z0-9]{9}", given):
            return given
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(MISTRAL_ID_CHARS))


class Llama3Parser(BlockParser):
    """``<|python_tag|>{"name": ..., "parameters": {...}}; {...}``, the tag often missing. Other JSON is content."""

    name = "llama3_json"
    openers = ("<|python_tag|>", "{")

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Any:
        # Every brace opens a block, so their number is bounded here; text beyond is content.
        return super().parse(text, tools) if text.count("{") <= BARE_ATTEMPTS else self._parse_start(text, tools)

    def _parse_start(self, text: str, tools: Sequence[dict[str, Any]]) -> Any:
        """Behind a block that was read nothing is counted, so braces within long arguments cost nothing."""
        attempts = 0

        class Bounded(Llama3Parser):
            def read(self, text: str, start: int, types: Types) -> Block:
                nonlocal attempts
                attempts += 1
                return Block(len(text), skip=False) if attempts > BARE_ATTEMPTS else super().read(text, start, types)

        return BlockParser.parse(Bounded(), text, tools)

    def read(self, text: str, start: int, types: Types) -> Block:
        tagged = text.startswith(self.openers[0], start)
        position, calls = start + (len(self.openers[0]) if tagged else 0), list[ToolCall]()
        try:
            value, position = read_json(text, position)
        except ValueError as error:
            if tagged:
                return self.damaged(text, start, str(error).split(":")[0])
            return Block(start + 1, skip=False)
        try:
            known = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
            if not (tagged or known):
                return Block(position, skip=False)
            calls += [call_of(one) for one in (value if isinstance(value, list) else [value])]
        except ValueError as error:
            if tagged:
                return Block(position, errors=[f"{self.name}: {error}, found {text[start:position][:80]!r}"])
            return Block(position, skip=False)
        after = skip_space(text, position)
        return Block(after + 1 if text[after : after + 1] == ";" else position, calls)

    def damaged(self, text: str, start: int, why: str) -> Block:
        # A brace is an opener, and one stands in nearly every damaged block: only the tag begins a new one.
        following = text.find(self.openers[0], start + 1)
        end = following if following >= 0 else len(text)
        return Block(end, errors=[f"{self.name}: {why}, found {text[start:end][:80]!r}"])

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls)


class Llama4Parser(Llama3Parser):
    """As llama3_json."""

    name = "llama4_json"


class Qwen3CoderParser(BlockParser):
    """``<tool_call><function=f><parameter=a>12</parameter></function></tool_call>``; outer tag and closing tags may be
    missing. One line break at either end of a value is not part of it."""

    name = "qwen3_coder"
    openers = ("<function=",)
    closers = ("<tool_call>", "</tool_call>")

    _VALUE_END: ClassVar[re.Pattern[str]] = re.compile(
        r"</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|<function=|\Z))"
    )
    _LOST_END: ClassVar[re.Pattern[str]] = re.compile(r"(?=<parameter=|</function>|</tool_call>|\Z)")

    def read(self, text: str, start: int, types: Types) -> Block:
        position = start + len("<function=")
        close = text.find(">", position)
        name = text[position:close].strip().strip("\"'") if close >= 0 else ""
        if not name or len(name) > 128 or read_name(name, 0) != name:
            return self.damaged(text, start, "no name")
        position, arguments = close + 1, dict[str, Any]()
        while text.startswith("<parameter=", skip_space(text, position)):
            position = skip_space(text, position) + len("<parameter=")
            close = text.find(">", position)
            if close < 0:
                return self.damaged(text, start, "a parameter without a name")
            key = text[position:close].strip().strip("\"'")
            end = self._VALUE_END.search(text, close + 1) or self._LOST_END.search(text, close + 1)
            assert end is not None  # the second pattern matches at the end of the text
            value = text[close + 1 : end.start()].removeprefix("\n").removesuffix("\n")
            arguments[key] = value_of(value, types.get(name, {}).get(key))
            position = end.end()
        for mark in ("</function>", "</tool_call>"):
            if text.startswith(mark, skip_space(text, position)):
                position = skip_space(text, position) + len(mark)
        return Block(position, [ToolCall(new_id(), name, json_text(arguments))])

    def render(self, calls: Sequence[ToolCall]) -> str:
        def one(call: ToolCall) -> str:
            parameters = "".join(
                f"<parameter={key}>\n{plain_text(value)}\n</parameter>\n" for key, value in arguments_of(call).items()
            )
            return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

        return "\n".join(one(call) for call in calls)


class Glm45Parser(BlockParser):
    """``<tool_call>f`` and pairs of ``<arg_key>x</arg_key><arg_value>1</arg_value>``, with or without line breaks."""

    name = "glm45"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    between: ClassVar[str] = "\n"

    _KEY: ClassVar[re.Pattern[str]] = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
    _VALUE_END: ClassVar[re.Pattern[str]] = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|<tool_call>|\Z))")

    def read(self, text: str, start: int, types: Types) -> Block:
        position = skip_space(text, start + len(self.openers[0]))
        name = read_name(text, position)
        if not name:
            return self.damaged(text, start, "no name")
        position, arguments = position + len(name), dict[str, Any]()
        while key := self._KEY.match(text, position):
            end = self._VALUE_END.search(text, key.end())
            if end is None:
                return self.damaged(text, start, "an arg_value without an end")
            word = key.group(1).strip()
            arguments[word] = value_of(text[key.end() : end.start()], types.get(name, {}).get(word))
            position = end.end()
        position = skip_space(text, position)
        if text.startswith(self.closers[0], position):
            position += len(self.closers[0])
        elif position < len(text) and not text.startswith(self.openers[0], position):
            return self.damaged(text, start, "no arguments where they should stand")
        return Block(position, [ToolCall(new_id(), name, json_text(arguments))])

    def render(self, calls: Sequence[ToolCall]) -> str:
        line = self.between

        def one(call: ToolCall) -> str:
            pairs = "".join(
                f"<arg_key>{key}</arg_key>{line}<arg_value>{plain_text(value)}</arg_value>{line}"
                for key, value in arguments_of(call).items()
            )
            return f"<tool_call>{call.name}{line}{pairs}</tool_call>"

        return "\n".join(one(call) for call in calls)


class Glm47Parser(Glm45Parser):
    """As glm45, written without line breaks."""

    name = "glm47"
    between = ""


class DeepseekV3Parser(BlockParser):
    """``function``, the separator, the name and a fenced block of JSON between special tokens (with U+FF5C and U+2581).
    Arguments that are no JSON are passed on as they are."""

    name = "deepseek_v3"
    openers = ("<｜tool▁call▁begin｜>",)  # noqa: RUF001 - the model's own token
    closers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001 - as above
    separator: ClassVar[str] = "<｜tool▁sep｜>"  # noqa: RUF001 - as above
    fenced: ClassVar[bool] = True

    def read(self, text: str, start: int, types: Types) -> Block:
        position, call_end = start + len(self.openers[0]), self.closers[2]
        following = text.find(self.openers[0], position)
        separator = text.find(self.separator, position)
        if separator < 0 or 0 <= following < separator:
            return self.damaged(text, start, "no separator")
        name, position = text[position:separator].strip(), separator + len(self.separator)
        if self.fenced:
            name = read_name(text, skip_space(text, position))
            position = skip_space(text, position) + len(name)
        if not name or read_name(name, 0) != name:
            return self.damaged(text, start, "no name")
        if fence := re.compile(r"\s*```(?:json)?[ \t]*\n?").match(text, position):
            position = fence.end()
        try:
            value, end = read_json(text, position)
            arguments = arguments_text(value)
        except ValueError:
            ends = [text.find(mark, position) for mark in (call_end, *self.openers, self.closers[1])]
            end = min((one for one in ends if one >= 0), default=len(text))
            arguments = text[position:end].strip().removesuffix("```").strip() or "{}"
        if close := re.compile(r"\s*(?:```)?\s*" + re.escape(call_end)).match(text, end):
            end = close.end()
        return Block(end, [ToolCall(new_id(), name, arguments)])

    def render(self, calls: Sequence[ToolCall]) -> str:
        inner = "".join(f"{self.openers[0]}{self._one(call)}{self.closers[2]}" for call in calls)
        return f"{self.closers[0]}{inner}{self.closers[1]}"

    def _one(self, call: ToolCall) -> str:
        return f"function{self.separator}{call.name}\n```json\n{call.arguments}\n```"


class DeepseekV31Parser(DeepseekV3Parser):
    """Name, separator, arguments: no type and no fence."""

    name = "deepseek_v3_1"
    fenced = False

    def _one(self, call: ToolCall) -> str:
        return f"{call.name}{self.separator}{call.arguments}"


class KimiK2Parser(BlockParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section; the id is
    kept."""

    name = "kimi_k2"
    openers = ("<|tool_call_begin|>",)
    closers = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_section_begin|>",
        "<|tool_call_section_end|>",
        "<|tool_call_end|>",
    )
    separator: ClassVar[str] = "<|tool_call_argument_begin|>"

    def read(self, text: str, start: int, types: Types) -> Block:
        position = start + len(self.openers[0])
        following, separator = text.find(self.openers[0], position), text.find(self.separator, position)
        if separator < 0 or 0 <= following < separator:
            return self.damaged(text, start, "no arguments")
        given = text[position:separator].strip()
        name = given.rsplit(":", 1)[0].rsplit(".", 1)[-1]
        if not name or read_name(name, 0) != name:
            return self.damaged(text, start, "no name")
        position, call_end = separator + len(self.separator), self.closers[4]
        try:
            value, end = read_json(text, position)
            arguments = arguments_text(value)
        except ValueError:
            ends = [text.find(mark, position) for mark in (*self.openers, *self.closers)]
            end = min((one for one in ends if one >= 0), default=len(text))
            arguments = text[position:end].strip() or "{}"
        after = skip_space(text, end)
        return Block(
            after + len(call_end) if text.startswith(call_end, after) else end, [ToolCall(given, name, arguments)]
        )

    def render(self, calls: Sequence[ToolCall]) -> str:
        inner = "".join(
            f"{self.openers[0]}functions.{call.name}:{index}{self.separator}{call.arguments}{self.closers[4]}"
            for index, call in enumerate(calls)
        )
        return f"{self.closers[0]}{inner}{self.closers[1]}"

"""Which parser reads which family of models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hermes_rl_mcp.agent.parsers import families
from hermes_rl_mcp.agent.parsers.blocks import BlockParser
from hermes_rl_mcp.errors import InvalidValueError

PARSERS: Mapping[str, type[BlockParser]] = MappingProxyType(
    {
        "deepseek_v3": families.DeepseekV3Parser,
        "deepseek_v31": families.DeepseekV31Parser,
        "deepseek_v3_1": families.DeepseekV31Parser,
        "glm45": families.Glm45Parser,
        "glm47": families.Glm47Parser,
        "hermes": families.HermesParser,
        "kimi_k2": families.KimiK2Parser,
        "llama3_json": families.Llama3Parser,
        "llama4_json": families.Llama4Parser,
        "longcat": families.LongcatParser,
        "mistral": families.MistralParser,
        "qwen": families.QwenParser,
        "qwen3_coder": families.Qwen3CoderParser,
    }
)

_FAMILIES = (
    ("qwen3-coder", "qwen3_coder"),
    ("qwen", "qwen"),
    ("deepseek-v3.1", "deepseek_v3_1"),
    ("deepseek", "deepseek_v3"),
    ("glm-4.7", "glm47"),
    ("glm", "glm45"),
    ("kimi", "kimi_k2"),
    ("longcat", "longcat"),
    ("hermes", "hermes"),
    ("mistral", "mistral"),
    ("ministral", "mistral"),
    ("llama-4", "llama4_json"),
    ("llama-3", "llama3_json"),
)
"""Part of a model's name in lower case to its parser; the first that fits."""


def get_parser(name: str) -> BlockParser:
    """Raises InvalidValueError naming those there are."""
    if name not in PARSERS:
        raise InvalidValueError(
            f"There is no tool-call parser '{name}'.", hint=f"Set tool_call_parser to one of: {', '.join(PARSERS)}."
        )
    return PARSERS[name]()


def list_parsers() -> list[str]:
    return sorted(PARSERS)


def parser_for_model(model: str) -> str:
    """The parser of the model's family, told from its name; hermes if it says nothing."""
    low = model.lower()
    return next((parser for part, parser in _FAMILIES if part in low), "hermes")

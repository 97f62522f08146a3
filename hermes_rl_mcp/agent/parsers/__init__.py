"""Tool calls out of a model's text, by the family of the model: 13 names, each with the format that family was taught.

Text around the calls is kept, a damaged block costs only itself, and what a model wrote while thinking is no call.
"""

from __future__ import annotations

from hermes_rl_mcp.agent.parsers.blocks import BlockParser
from hermes_rl_mcp.agent.parsers.registry import PARSERS, get_parser, list_parsers, parser_for_model
from hermes_rl_mcp.agent.parsers.stream import Stream

__all__ = ["PARSERS", "BlockParser", "Stream", "get_parser", "list_parsers", "parser_for_model"]

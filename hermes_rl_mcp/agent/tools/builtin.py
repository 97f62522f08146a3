"""All tools that come with the product, in the order in which they are offered."""

from __future__ import annotations

from hermes_rl_mcp.agent.interfaces import Tool
from hermes_rl_mcp.agent.tools import browser, files, media, terminal, todo, web


def builtin_tools() -> tuple[Tool, ...]:
    return (*web.TOOLS, *terminal.TOOLS, *files.TOOLS, *media.TOOLS, *browser.TOOLS, *todo.TOOLS)

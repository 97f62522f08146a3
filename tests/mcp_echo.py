"""An MCP server for tests: ``python mcp_echo.py`` over stdio, ``python mcp_echo.py PORT`` over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("echo")


@server.tool()
def echo(text: str, times: int = 1) -> str:
    """Says it again."""
    return text * times


@server.tool()
def pid() -> dict[str, int]:
    """Its process."""
    return {"pid": os.getpid()}


@server.tool()
def fail() -> str:
    """Never works."""
    raise ToolError("it does not work")


@server.tool()
def sleep(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

"""What the official suite has the server ask or tell its client in the middle of a call: log, elicitation, sampling,
a stream that breaks, a capability that is missing, lists that change.

The first half is of the handshake's time (2025-11-25 and before), the second of 2026-07-28.
"""

from typing import Annotated, Any

import anyio
import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from pydantic import BaseModel, Field

_STEP_S = 0.05
_RECONNECT_S = 0.2


class Answered(BaseModel):
    response: str = Field(description="User's response")


class Defaults(BaseModel):
    """One default of each primitive type."""

    name: str = Field("John Doe", description="User name")
    age: int = Field(30, description="User age")
    score: float = Field(95.5, description="User score")
    status: Annotated[str, Field(json_schema_extra={"enum": ["active", "inactive", "pending"]})] = "active"
    verified: bool = Field(True, description="Verification status")


def _titled(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in pairs]


_OPTIONS = ("option1", "First Option"), ("option2", "Second Option"), ("option3", "Third Option")
_NAMES = [value for value, _ in _OPTIONS]
ENUMS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": _NAMES},
        "titledSingle": {"type": "string", "oneOf": _titled(*_OPTIONS)},
        "legacyEnum": {"type": "string", "enum": _NAMES, "enumNames": [title for _, title in _OPTIONS]},
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": _NAMES}},
        "titledMulti": {"type": "array", "items": {"anyOf": _titled(*_OPTIONS)}},
    },
    "required": [],
}
"""The five ways of a choice."""


def register(server: MCPServer[Any]) -> None:
    _of_the_handshake(server)
    _of_2026(server)


def _of_the_handshake(server: MCPServer[Any]) -> None:
    @server.tool(structured_output=False)
    async def test_tool_with_logging(ctx: Context) -> str:
        """Logs three times."""
        for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.info(line)
            await anyio.sleep(_STEP_S)
        return "done"

    @server.tool(structured_output=False)
    async def test_sampling(prompt: str, ctx: Context) -> str:
        """Has the client's model answer."""
        message = t.SamplingMessage(role="user", content=t.TextContent(type="text", text=prompt))
        answer = await ctx.session.create_message([message], max_tokens=100, related_request_id=ctx.request_id)
        said = answer.content.text if isinstance(answer.content, t.TextContent) else ""
        return f"LLM response: {said}"

    @server.tool(structured_output=False)
    async def test_elicitation(message: str, ctx: Context) -> str:
        """Has the client's user answer."""
        answer = await ctx.elicit(message, Answered)
        content = answer.data.model_dump_json() if answer.action == "accept" else "{}"
        return f"User response: action={answer.action}, content={content}"

    @server.tool(structured_output=False)
    async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
        """Asks with a default in every field."""
        answer = await ctx.elicit("Please provide user information", Defaults)
        content = answer.data.model_dump_json() if answer.action == "accept" else "{}"
        return f"Elicitation completed: action={answer.action}, content={content}"

    @server.tool(structured_output=False)
    async def test_elicitation_sep1330_enums(ctx: Context) -> str:
        """Asks for choices of every form."""
        answer = await ctx.session.elicit_form("Please choose", ENUMS, ctx.request_id)
        return f"Elicitation completed: action={answer.action}, content={answer.content}"

    @server.tool(structured_output=False)
    async def test_reconnection(ctx: Context) -> str:
        """Closes its own stream, so that the client comes back for the answer."""
        await ctx.close_sse_stream()
        await anyio.sleep(_RECONNECT_S)
        return "Reconnection test completed"


def _of_2026(server: MCPServer[Any]) -> None:
    @server.tool(structured_output=False)
    async def test_missing_capability(ctx: Context) -> str:
        """Needs a client that samples."""
        capabilities = ctx.client_capabilities
        if capabilities is None or capabilities.sampling is None:
            needed = t.ClientCapabilities(sampling=t.SamplingCapability())
            raise MCPError(
                code=t.MISSING_REQUIRED_CLIENT_CAPABILITY,
                message="This tool needs the sampling capability.",
                data={"requiredCapabilities": needed.model_dump(by_alias=True, exclude_none=True)},
            )
        return "The client samples."

    @server.tool(structured_output=False)
    async def test_streaming_elicitation(ctx: Context) -> str:
        """Only tells on its stream, never asks there."""
        await ctx.report_progress(1, 2, "half")
        return "done"

    @server.tool(structured_output=False)
    async def test_logging_tool(ctx: Context) -> str:
        """Logs; nobody hears it who did not ask for a level."""
        await ctx.info("test_logging_tool ran")
        return "done"

    @server.tool(structured_output=False)
    async def test_trigger_tool_change(ctx: Context) -> str:
        """Says that the list of tools is another one now."""
        await ctx.notify_tools_changed()
        return "told"

    @server.tool(structured_output=False)
    async def test_trigger_prompt_change(ctx: Context) -> str:
        """Says that the list of prompts is another one now."""
        await ctx.notify_prompts_changed()
        return "told"

"""What the official suite reads: every kind of content, a schema with every keyword, resources and prompts.

Names, arguments and the texts that are checked are the suite's.
"""

import base64
import json
import struct
import zlib
from typing import Annotated, Any

import anyio
import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import UserMessage
from pydantic import Field

from hermes_rl_mcp.errors import HermesRLError

_STEP_S = 0.05


def _png() -> bytes:
    """One red point."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    )


def _wav() -> bytes:
    """Two samples of silence."""
    samples = bytes(4)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def _text(text: str) -> t.TextContent:
    return t.TextContent(type="text", text=text)


def _image() -> t.ImageContent:
    return t.ImageContent(type="image", data=base64.b64encode(_png()).decode(), mime_type="image/png")


def _embedded(uri: str, mime_type: str, text: str) -> t.EmbeddedResource:
    return t.EmbeddedResource(type="resource", resource=t.TextResourceContents(uri=uri, mime_type=mime_type, text=text))


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
"""The suite's own; it looks for each keyword in what the server lists."""


def register(server: MCPServer[Any]) -> None:
    _tools(server)
    _resources(server)
    _prompts(server)


def _tools(server: MCPServer[Any]) -> None:
    @server.tool(structured_output=False)
    async def test_simple_text() -> str:
        """One text."""
        return "This is a simple text response for testing."

    @server.tool(structured_output=False)
    async def test_image_content() -> list[t.ImageContent]:
        """One picture."""
        return [_image()]

    @server.tool(structured_output=False)
    async def test_audio_content() -> list[t.AudioContent]:
        """One sound."""
        return [t.AudioContent(type="audio", data=base64.b64encode(_wav()).decode(), mime_type="audio/wav")]

    @server.tool(structured_output=False)
    async def test_embedded_resource() -> list[t.EmbeddedResource]:
        """One resource inside the answer."""
        return [_embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]

    @server.tool(structured_output=False)
    async def test_multiple_content_types() -> list[t.TextContent | t.ImageContent | t.EmbeddedResource]:
        """A text, a picture and a resource."""
        data = json.dumps({"test": "data", "value": 123})
        return [
            _text("Multiple content types test:"),
            _image(),
            _embedded("test://mixed-content-resource", "application/json", data),
        ]

    @server.tool(structured_output=False)
    async def test_error_handling() -> str:
        """Fails."""
        raise HermesRLError("This tool intentionally returns an error for testing")

    @server.tool(structured_output=False)
    async def test_tool_with_progress(ctx: Context) -> str:
        """Reports where it is three times."""
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100, f"Completed step {done} of 100")
            await anyio.sleep(_STEP_S)
        return "done"

    @server.tool(structured_output=False)
    async def json_schema_2020_12_tool(name: str = "") -> str:
        """Takes what a full JSON schema describes."""
        return f"Hello, {name}."

    tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
    assert tool is not None
    tool.parameters = SCHEMA

    @server.tool(structured_output=False)
    async def test_custom_header(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})] = "",
    ) -> str:
        """Takes an argument that travels in a header, too."""
        return f"region={region}"


def _resources(server: MCPServer[Any]) -> None:
    @server.resource("test://static-text", mime_type="text/plain")
    def static_text() -> str:
        """A text."""
        return "This is the content of the static text resource."

    @server.resource("test://static-binary", mime_type="image/png")
    def static_binary() -> bytes:
        """A picture."""
        return _png()

    @server.resource("test://template/{id}/data", mime_type="application/json")
    def template(id: str) -> str:
        """One of many."""
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    @server.resource("test://watched-resource", mime_type="text/plain")
    def watched() -> str:
        """One to subscribe to."""
        return "Watched resource content"


def _prompts(server: MCPServer[Any]) -> None:
    @server.prompt()
    def test_simple_prompt() -> list[UserMessage]:
        """Takes nothing."""
        return [UserMessage("This is a simple prompt for testing.")]

    @server.prompt()
    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
        """Takes two arguments."""
        return [UserMessage(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")]

    @server.prompt()
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
        """Has a resource in it."""
        inside = _embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
        return [UserMessage(inside), UserMessage("Please process the embedded resource above.")]

    @server.prompt()
    def test_prompt_with_image() -> list[UserMessage]:
        """Has a picture in it."""
        return [UserMessage(_image()), UserMessage("Please analyze the image above.")]

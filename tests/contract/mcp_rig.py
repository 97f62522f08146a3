"""A server over stdio or in memory, and checks every tool answer must pass."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import mcp.types as t
from mcp import Client, StdioServerParameters

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags
from hermes_rl_mcp.server.app import build_server
from hermes_rl_mcp.untrusted import quoted_values

SERVER = ["-P", "-m", "hermes_rl_mcp.server"]


class Tools:
    """Calls tools, and checks every answer's structured content against the schema that the tool publishes."""

    def __init__(self, client: Client, listed: list[t.Tool]) -> None:
        self.client = client
        self.listed = {tool.name: tool for tool in listed}

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Structured content of a success."""
        answer = await self.raw(tool, arguments)
        assert not answer.is_error, answer.content
        return self._content(answer)

    async def error(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Payload of an error; its text says at least what the payload's sentence says."""
        answer = await self.raw(tool, arguments)
        assert answer.is_error, answer.structured_content
        payload = self._content(answer)
        [block] = answer.content
        assert isinstance(block, t.TextContent)
        assert quoted_values(payload["error"]) in block.text
        assert quoted_values(payload.get("hint", "")) in block.text
        return payload

    async def raw(self, tool: str, arguments: Mapping[str, Any]) -> t.CallToolResult:
        answer = await self.client.call_tool(tool, dict(arguments))
        if tool in self.listed:
            schema = self.listed[tool].output_schema
            assert schema is not None
            jsonschema.Draft202012Validator(schema).validate(answer.structured_content)
        return answer

    @staticmethod
    def _content(answer: t.CallToolResult) -> dict[str, Any]:
        assert answer.structured_content is not None
        json.dumps(answer.structured_content, allow_nan=False)
        return answer.structured_content


@asynccontextmanager
async def over_stdio(environ: dict[str, str], mode: Any = "auto", *flags: str) -> AsyncIterator[Tools]:
    """A server process of its own."""
    server = StdioServerParameters(command=sys.executable, args=[*SERVER, *flags], env=environ)
    async with Client(server, mode=mode, read_timeout_seconds=90) as client:
        yield Tools(client, (await client.list_tools()).tools)


@asynccontextmanager
async def in_memory(environ: dict[str, str], **flags: Any) -> AsyncIterator[Tools]:
    """The same server without a process around it."""
    async with Client(build_server(Operations.from_environ(environ, Flags(**flags)))) as client:
        yield Tools(client, (await client.list_tools()).tools)


def environment_file(folder: Path, body: str = "", stem: str = "own") -> Path:
    """A user's environment with one field of each kind that matters here."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.py"
    path.write_text(
        textwrap.dedent('''
        from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig

        class OwnConfig(BaseEnvConfig):
            level: int = 1
            """How hard."""
            data_dir: str | None = None
            """Where the data is."""
            api_key: str = ""
            """Of a judge."""

        class Own(BaseEnv):
            """A user's environment."""
            name = "own"
            env_config_cls = OwnConfig

            @classmethod
            def config_init(cls):
                return OwnConfig(group_size=4, batch_size=8, total_steps=3, max_token_length=16), [APIServerConfig()]

            async def get_next_item(self):
                return "item"

            def get_messages(self, item):
                return [{"role": "user", "content": item}]

            def score_answer(self, item, completion):
                return 1.0
        ''')
        + textwrap.dedent(body)
    )
    return path

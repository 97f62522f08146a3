"""What the scenario needs of a client library, in the words of the protocol: each library's module makes a ``Wire``.

Standard library alone: this also runs in the virtual environments of other clients, where our package is not installed.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

ERA = {"legacy": "2025-11-25", "modern": "2026-07-28"}
"""Newest revision of each era."""


@dataclass(frozen=True)
class Target:
    """A server: a command for stdio, else an address."""

    transport: str
    """stdio, sse or streamable-http."""
    url: str = ""
    token: str = ""
    command: str = ""
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@dataclass(frozen=True)
class Answer:
    """One answer of a tool, from its JSON."""

    failed: bool
    text: str
    data: dict[str, Any]
    images: list[tuple[str, bytes]]
    """Type and bytes."""
    links: list[str]

    @classmethod
    def of(cls, result: dict[str, Any]) -> Answer:
        blocks = result["content"]
        return cls(
            failed=bool(result.get("isError")),
            text="\n".join(block["text"] for block in blocks if block["type"] == "text"),
            data=result.get("structuredContent") or {},
            images=[(b["mimeType"], base64.b64decode(b["data"])) for b in blocks if b["type"] == "image"],
            links=[block["uri"] for block in blocks if block["type"] == "resource_link"],
        )


OnProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class Wire(Protocol):
    """One connection. Lists are whole: pages are followed."""

    revision: str
    """Of the protocol, as negotiated."""

    async def tools(self) -> list[str]: ...

    async def call(self, tool: str, arguments: dict[str, Any], on_progress: OnProgress | None = None) -> Answer: ...

    async def resources(self) -> list[str]: ...

    async def templates(self) -> list[str]: ...

    async def read(self, uri: str) -> str | bytes: ...

    async def prompts(self) -> dict[str, list[str]]:
        """Arguments that each must have."""

    async def prompt(self, name: str, arguments: dict[str, str]) -> str: ...

    async def complete(self, template: str, argument: str, value: str) -> list[str]: ...

    def watch(self, uri: str) -> AbstractAsyncContextManager[list[str]]:
        """Subscribes for the block; the list grows by each resource that is said to have changed."""


async def every_page(fetch: Callable[[str | None], Awaitable[tuple[list[Any], str | None]]]) -> list[Any]:
    found, cursor = await fetch(None)
    while cursor:
        more, cursor = await fetch(cursor)
        found += more
    return found


def content_of(contents: list[dict[str, Any]]) -> str | bytes:
    """The one content of a resource, from its JSON."""
    [content] = contents
    text: str | None = content.get("text")
    return base64.b64decode(content["blob"]) if text is None else text


def said_in(messages: list[dict[str, Any]]) -> str:
    return "\n".join(message["content"].get("text", "") for message in messages)

"""Builds the MCP server: ten tools and the resources, over one Operations object.

Adds to the SDK's server what it lacks: errors as structured answers, and resources listed from what is on disk now.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import mcp.types as t
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.shared.exceptions import MCPError
from pydantic import AnyUrl, ValidationError

from hermes_rl_mcp import __version__
from hermes_rl_mcp.errors import DeclinedError, HermesRLError, InvalidValueError
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.starting import relaunch_queued
from hermes_rl_mcp.redact import redact_text, secret_values
from hermes_rl_mcp.server import completions, prompts, tools
from hermes_rl_mcp.server.answers import bad_arguments, crashed, failure, masked, no_such_tool, unknown_arguments
from hermes_rl_mcp.server.instructions import INSTRUCTIONS
from hermes_rl_mcp.server.notifier import Notifier
from hermes_rl_mcp.server.resources.serving import Resources

log = logging.getLogger(__name__)

_FIRST_ANSWERS_S = 1.0


class HermesServer(MCPServer[Any]):
    """MCPServer whose tool errors carry structured content and whose resources are found when asked for."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self._not_offered: dict[str, str] = {}
        self._resources = Resources(operations.context)
        self.notifier = Notifier(operations.context, self._resources)
        super().__init__(
            name="hermes-rl",
            title="Hermes RL",
            description="Trains language models by reinforcement learning on this machine.",
            instructions=INSTRUCTIONS,
            version=__version__,
            log_level="INFO",
            lifespan=self._lifespan,
            subscriptions=self.notifier.bus,
        )
        self.notifier.attach(self)
        self._lowlevel_server.add_request_handler("logging/setLevel", t.SetLevelRequestParams, self._set_level)

    @asynccontextmanager
    async def _lifespan(self, _: MCPServer[Any]) -> AsyncIterator[None]:
        """Holds no state: SSE enters it once per connection. Queued runs wait for nobody's first call."""

        def relaunch() -> None:
            anyio.run(relaunch_queued, self.operations.context)

        async def relaunch_soon() -> None:  # it reads every run: a client that has just come is answered before
            await anyio.sleep(_FIRST_ANSWERS_S)
            await anyio.to_thread.run_sync(relaunch, abandon_on_cancel=True)

        if self.operations.context.settings.read_only:
            yield None
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relaunch_soon)
            yield None
            tasks.cancel_scope.cancel()

    def choose_tools(self) -> None:
        """Takes out of the list what the operator does not offer. Raises InvalidValueError for names that are none."""
        settings = self.operations.context.settings
        tools = {tool.name: tool for tool in self._tool_manager.list_tools()}
        strangers = sorted({*(settings.tools or ()), *settings.exclude_tools} - set(tools))
        if strangers:
            raise InvalidValueError(
                f"--tools, --exclude-tools: there is no tool '{strangers[0]}'.", hint=f"There are: {', '.join(tools)}."
            )
        for name, tool in tools.items():
            if settings.read_only and not (tool.annotations and tool.annotations.read_only_hint):
                self._not_offered[name] = "this server was started with --read-only"
            elif name in settings.exclude_tools or (settings.tools is not None and name not in settings.tools):
                self._not_offered[name] = "the person who runs this server does not offer it"
        if len(self._not_offered) == len(tools):
            raise InvalidValueError("No tool is left to offer.", hint="Check --tools, --exclude-tools and --read-only.")
        for name in self._not_offered:
            self.remove_tool(name)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> t.CallToolResult | t.InputRequiredResult:
        if why := self._not_offered.get(name):
            return no_such_tool(f"{name} is not available: {why}.")
        try:
            answer = self._refusal(name, arguments) or await super().call_tool(name, arguments, context)
        except ToolError as error:
            answer = _answer(name, error)
        except MCPError as error:  # as an error of the protocol the model would not see it
            if error.code == t.MISSING_REQUIRED_CLIENT_CAPABILITY:
                raise  # except for this one, with which the protocol wants to be answered
            log.info("%s: the client did not put the question: %s", name, error)
            answer = failure(DeclinedError(f"could not be reached through this client ({error})"))
        secrets = secret_values(self.operations.context.operator.environ)
        return masked(answer, secrets) if isinstance(answer, t.CallToolResult) else answer

    def _refusal(self, name: str, arguments: dict[str, Any]) -> t.CallToolResult | None:
        """The SDK leaves out what a tool does not know."""
        tool = self._tool_manager.get_tool(name)
        return unknown_arguments(name, arguments, list(tool.parameters["properties"])) if tool else None

    async def list_resources(self) -> list[t.Resource]:
        return [*await super().list_resources(), *await self._resources.listed()]

    async def list_resource_templates(self) -> list[t.ResourceTemplate]:
        return [*self._resources.templates(), *await super().list_resource_templates()]

    async def read_resource(
        self, uri: AnyUrl | str, context: Context[Any, Any] | None = None
    ) -> Iterable[ReadResourceContents] | t.InputRequiredResult:
        ours = await self._resources.read(str(uri))
        return await super().read_resource(uri, context) if ours is None else ours

    async def get_prompt(
        self, name: str, arguments: dict[str, Any] | None = None, context: Context[Any, Any] | None = None
    ) -> t.GetPromptResult | t.InputRequiredResult:
        prompts.check(self._prompt_manager.get_prompt(name), name, arguments)
        return await super().get_prompt(name, arguments, context)

    async def _set_level(self, ctx: ServerRequestContext[Any, Any], params: t.SetLevelRequestParams) -> t.EmptyResult:
        """Taken, because clients up to 2025-11-25 ask for a level of their own accord and give up on an error. Nothing
        follows from it: this server logs to stderr and to its file, not to clients."""
        return t.EmptyResult()


def _answer(name: str, error: ToolError) -> t.CallToolResult:
    cause = error.__cause__
    if isinstance(cause, HermesRLError):
        log.info("%s: %s", name, redact_text(str(cause)))
        return failure(cause)
    if cause is None:
        return no_such_tool(f"{error}.")
    if isinstance(cause, ToolError):  # the SDK's, of what the client made of a question
        return failure(DeclinedError("gave no answer that fits the form"))
    if isinstance(cause, ValidationError) and not isinstance(
        error, UnexpectedToolError
    ):  # the SDK's check of arguments
        return bad_arguments(name, cause)
    log.error("unexpected error in %s", name, exc_info=cause)
    return crashed(name, cause)


def build_server(operations: Operations) -> HermesServer:
    """The server, ready to be served over any transport. Configure logging first: the SDK would do it otherwise."""
    server = HermesServer(operations)
    tools.register(server, operations)
    server.choose_tools()
    prompts.register(server, operations)
    completions.register(server, operations.context)
    return server

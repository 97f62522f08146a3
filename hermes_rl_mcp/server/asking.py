"""Asks the person at the client, in both protocol eras, when an operation says that it needs their word.

A tool is tried without a word. If that raises ConfirmationError, nothing was done yet: the person is asked where the
client can ask, and with their yes the tool is called again. The SDK carries the question, as a request of the server
(to 2025-11-25) or as an answer that asks for input (from 2026-07-28). A client that cannot ask gets the error, which
names the argument ``confirm``; one that can has its person asked whatever ``confirm`` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import mcp.types as t
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, Resolve
from pydantic import BaseModel, Field

from hermes_rl_mcp.errors import ConfirmationError, DeclinedError
from hermes_rl_mcp.operations.asking import Caller
from hermes_rl_mcp.untrusted import shown

Tool = Callable[..., Awaitable[t.CallToolResult]]
Confirm = Annotated[
    bool, Field(description="Only after an error asked for a person's word, and only if they gave it to you.")
]
_NAME_CHARS = 60
_UNNAMED = "an unnamed client"
_FIRST_MODERN = "2026-07-28"


class Word(BaseModel):
    """Your word on it."""  # shown to the person

    go_ahead: bool = Field(title="Go ahead", description="Yes: do it. No: leave everything as it is.")


def caller(ctx: Context[Any, Any]) -> Caller:
    """The client behind a request: of its handshake, or of the request's own ``_meta``."""
    params = ctx.session.client_params
    if params is None or not params.client_info.name.strip():
        return Caller(_UNNAMED)
    info = params.client_info
    return Caller(_one_line(info.name), _one_line(info.version or ""))


def _one_line(text: str) -> str:
    """It comes into a question to a person, whose lines are ours."""
    return shown(" ".join(text.split()), _NAME_CHARS)


def can_ask(ctx: Context[Any, Any]) -> bool:
    """Whether the client said that it can show a form, and this connection can carry the question."""
    capabilities = ctx.client_capabilities
    offered = capabilities.elicitation if capabilities is not None else None
    if offered is None or (offered.form is None and offered.url is not None):
        return False  # an empty declaration is older than the kinds, and means forms
    return (ctx.protocol_version or "") >= _FIRST_MODERN or ctx.session.can_send_request


def asks(tool: Tool) -> Tool:
    """``tool``, which has parameters ``ctx`` and ``confirm``, with the person asked in between. Same arguments, name
    and description."""
    given = inspect.signature(tool, eval_str=True)

    async def attempt(**arguments: Any) -> Any:
        ctx = arguments["ctx"]
        asking = can_ask(ctx)
        try:
            return await tool(**{**arguments, "confirm": arguments["confirm"] and not asking})
        except ConfirmationError as error:
            if not asking:
                raise
            return Elicit(shown(error.question), Word)

    async def asked(**arguments: Any) -> t.CallToolResult:
        outcome = arguments.pop("outcome")
        if not isinstance(outcome, AcceptedElicitation):
            raise DeclinedError("declined" if outcome.action == "decline" else "gave no answer")
        if isinstance(outcome.data, t.CallToolResult):
            return outcome.data
        if not outcome.data.go_ahead:
            raise DeclinedError("said no")
        return await tool(**{**arguments, "confirm": True})

    # The SDK reads signatures. It gets annotations as objects: names in a closure it could not look up.
    question = inspect.Parameter(
        "outcome", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[ElicitationResult[Word], Resolve(attempt)]
    )
    _describe(attempt, tool, given.parameters)
    _describe(asked, tool, {**given.parameters, "outcome": question}, given.return_annotation)
    return asked


def _describe(
    function: Any, tool: Tool, parameters: Mapping[str, inspect.Parameter], returns: Any = inspect.Signature.empty
) -> None:
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    function.__signature__ = inspect.Signature(by_name, return_annotation=returns)
    function.__annotations__ = {one.name: one.annotation for one in by_name}
    for name in ("__name__", "__doc__", "__module__"):
        setattr(function, name, getattr(tool, name))
    function.__qualname__ = tool.__name__  # a client sees it as the question's key

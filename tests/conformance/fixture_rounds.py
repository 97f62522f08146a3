"""What the official suite has the server ask in rounds (2026-07-28): a result that requires input, and the call again
with the answers. Names of tools, keys and the words that are checked are the suite's.

The state that travels through the client is sealed by the SDK: one that was changed never gets here.
"""

from typing import Any

import mcp.types as t
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.prompts.base import UserMessage

Round = t.CallToolResult | t.InputRequiredResult


def _form(message: str, field: str, kind: str = "string") -> t.ElicitRequest:
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    return t.ElicitRequest(params=t.ElicitRequestFormParams(message=message, requested_schema=schema))


def _sample(text: str, max_tokens: int) -> t.CreateMessageRequest:
    message = t.SamplingMessage(role="user", content=t.TextContent(type="text", text=text))
    return t.CreateMessageRequest(params=t.CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))


def _ask(state: str | None = None, **requests: t.InputRequest) -> t.InputRequiredResult:
    return t.InputRequiredResult(input_requests=requests, request_state=state)


def _say(text: str) -> t.CallToolResult:
    return t.CallToolResult(content=[t.TextContent(type="text", text=text)])


def _field(ctx: Context[Any, Any], key: str, field: str, kind: type) -> Any:
    """What the user put into the form, or None: not asked yet, another key, declined, or of another type."""
    answer = (ctx.input_responses or {}).get(key)
    if not isinstance(answer, t.ElicitResult) or answer.action != "accept" or not answer.content:
        return None
    value = answer.content.get(field)
    return value if isinstance(value, kind) else None


def register(server: MCPServer[Any]) -> None:
    _one_round(server)
    _with_state(server)

    @server.prompt()
    async def test_input_required_result_prompt(ctx: Context) -> list[UserMessage] | t.InputRequiredResult:
        """Asks before it says anything."""
        context = _field(ctx, "user_context", "context", str)
        if context is None:
            return _ask(user_context=_form("What context should the prompt use?", "context"))
        return [UserMessage(f"Use this context: {context}")]


def _one_round(server: MCPServer[Any]) -> None:
    @server.tool(structured_output=False)
    async def test_input_required_result_elicitation(ctx: Context) -> Round:
        """Asks for a name."""
        name = _field(ctx, "user_name", "name", str)
        return _ask(user_name=_form("What is your name?", "name")) if name is None else _say(f"Hello, {name}!")

    @server.tool(structured_output=False)
    async def test_input_required_result_sampling(ctx: Context) -> Round:
        """Asks the client's model."""
        answer = (ctx.input_responses or {}).get("capital_question")
        if not isinstance(answer, t.CreateMessageResult):
            return _ask(capital_question=_sample("What is the capital of France?", 100))
        return _say(answer.content.text if isinstance(answer.content, t.TextContent) else "")

    @server.tool(structured_output=False)
    async def test_input_required_result_list_roots(ctx: Context) -> Round:
        """Asks for the client's roots."""
        answer = (ctx.input_responses or {}).get("client_roots")
        if not isinstance(answer, t.ListRootsResult):
            return _ask(client_roots=t.ListRootsRequest(params=t.RequestParams()))
        return _say(", ".join(str(root.uri) for root in answer.roots))

    @server.tool(structured_output=False)
    async def test_input_required_result_capabilities(ctx: Context) -> Round:
        """Asks only what the client said it can answer."""
        if ctx.input_responses:
            return _say(f"answered: {', '.join(sorted(ctx.input_responses))}")
        can = ctx.client_capabilities or t.ClientCapabilities()
        requests: dict[str, t.InputRequest] = {}
        if can.elicitation is not None:
            requests["user_name"] = _form("What is your name?", "name")
        if can.sampling is not None:
            requests["greeting"] = _sample("Say hello.", 50)
        if can.roots is not None:
            requests["client_roots"] = t.ListRootsRequest(params=t.RequestParams())
        return _ask(**requests) if requests else _say("This client can answer nothing.")


def _with_state(server: MCPServer[Any]) -> None:
    @server.tool(structured_output=False)
    async def test_input_required_result_request_state(ctx: Context) -> Round:
        """Has its state back with the answer."""
        if ctx.request_state == "asked" and _field(ctx, "confirm", "ok", bool) is not None:
            return _say("state-ok")
        return _ask("asked", confirm=_form("Please confirm", "ok", "boolean"))

    @server.tool(structured_output=False)
    async def test_input_required_result_tampered_state(ctx: Context) -> Round:
        """Never sees a state that was changed on the way."""
        if ctx.request_state == "sealed" and _field(ctx, "confirm", "ok", bool) is not None:
            return _say("state-ok")
        return _ask("sealed", confirm=_form("Please confirm", "ok", "boolean"))

    @server.tool(structured_output=False)
    async def test_input_required_result_multiple_inputs(ctx: Context) -> Round:
        """Asks three things at once."""
        wanted = {
            "user_name": _form("What is your name?", "name"),
            "greeting": _sample("Generate a greeting", 50),
            "client_roots": t.ListRootsRequest(params=t.RequestParams()),
        }
        if ctx.request_state == "three" and set(wanted) <= set(ctx.input_responses or {}):
            return _say("all answered")
        return _ask("three", **wanted)

    @server.tool(structured_output=False)
    async def test_input_required_result_multi_round(ctx: Context) -> Round:
        """Asks twice; what was answered first travels in the state."""
        state = ctx.request_state or ""
        if state.startswith("second ") and (color := _field(ctx, "step2", "color", str)) is not None:
            return _say(f"{state.removeprefix('second ')} likes {color}")
        if state == "first" and (name := _field(ctx, "step1", "name", str)) is not None:
            return _ask(f"second {name}", step2=_form("Step 2: What is your favorite color?", "color"))
        return _ask("first", step1=_form("Step 1: What is your name?", "name"))

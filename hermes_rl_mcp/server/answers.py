"""How a result or an error becomes an MCP answer: short text for people and models, and the same as structured data.

Every answer is made here, so here is where text of models, environments and logs is made harmless on its way out.

An error is an ``isError`` result whose structured content is the error's payload. Some clients check structured content
against the tool's output schema even then, so every published schema also admits that payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

import mcp.types as t
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.fitting import content, fitted
from hermes_rl_mcp.redact import redact, redact_text
from hermes_rl_mcp.untrusted import MAX_ANSWER_CHARS, quoted_values, shown, shown_error

Answer = TypeVar("Answer", bound=BaseModel)


class ErrorPayload(BaseModel):
    """Structured content of a failed call. The lists help a program to repair its next call."""

    model_config = ConfigDict(extra="allow")

    error: str
    hint: str | None = None
    available: list[str] | None = None
    available_fields: list[str] | None = None
    active_runs: list[str] | None = None
    locked_value: JsonValue = None


def success(
    render: Callable[[Answer], str],
    result: Answer,
    links: Sequence[t.ResourceLink] = (),
    images: Sequence[t.ImageContent] = (),
    note: str | None = None,
) -> t.CallToolResult:
    """``result`` as text and as structured content: escaped, cut to length, and quotes marked as such in both.

    The text comes first; ``links`` lead to resources that go on where it ends.
    """
    structured = content(result)
    said = render(type(result).model_validate(quoted_values(structured)))
    text = shown("\n".join(filter(None, (said, note))), MAX_ANSWER_CHARS)
    blocks: list[t.ContentBlock] = [t.TextContent(type="text", text=text), *images, *links]
    return t.CallToolResult(content=blocks, structured_content=structured)


def masked(answer: t.CallToolResult, secrets: Sequence[str]) -> t.CallToolResult:
    """The same without ``secrets``, wherever in it a program, a log or a file may have put one."""
    blocks = [
        t.TextContent(type="text", text=redact_text(block.text, secrets)) if isinstance(block, t.TextContent) else block
        for block in answer.content
    ]
    structured = redact(answer.structured_content, secrets)
    return answer.model_copy(update={"content": blocks, "structured_content": structured})


def failure(error: HermesRLError) -> t.CallToolResult:
    """What happened, what to do next, and what there is to choose from."""
    payload = ErrorPayload.model_validate(fitted(shown_error(error)))
    text = quoted_values(f"{payload.error} {payload.hint or ''}".strip())
    for key in ("available", "available_fields", "active_runs", "valid_values", "allowed_models"):
        if values := error.details.get(key):
            text += f"\n{key}: {', '.join(quoted_values(str(value)) for value in values)}"
    if "locked_value" in error.details:
        text += f"\nlocked_value: {error.details['locked_value']}"
    return _failed(text, payload)


def bad_arguments(tool: str, error: ValidationError) -> t.CallToolResult:
    """Arguments that the tool's input schema does not admit."""
    items = error.errors(include_url=False, include_input=False)
    parts = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in items]
    text = f"Arguments of {tool} are not valid: {'; '.join(parts)}."
    hint = "Call it again with arguments that fit its input schema."
    return _failed(f"{text} {hint}", ErrorPayload(error=text, hint=hint))


def unknown_arguments(tool: str, given: Iterable[str], known: Sequence[str]) -> t.CallToolResult | None:
    """The error of names that the tool does not have: left out silently, a misspelt one would do something else than
    was asked for. None if there are none."""
    strange = [name for name in given if name not in known]
    if not strange:
        return None
    text = f"{tool} has no argument {', '.join(map(repr, strange))}; nothing was done."
    close = get_close_matches(strange[0], known, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    hint += f"Its arguments: {', '.join(known)}." if known else "It takes none."
    return _failed(f"{text} {hint}", ErrorPayload(error=text, hint=hint))


def no_such_tool(text: str) -> t.CallToolResult:
    """A tool that is not there, or not offered; ``text`` says which."""
    hint = "tools/list has those that are."
    return _failed(f"{text} {hint}", ErrorPayload(error=text, hint=hint))


def crashed(tool: str, error: BaseException) -> t.CallToolResult:
    """A defect of ours. The traceback is in the server's log, not in the answer."""
    text = f"Internal error in {tool}: {type(error).__name__}. This is a defect of hermes-rl-mcp."
    hint = "Nothing that was running is affected. Try once more; if it stays, tell the person who runs this server: "
    hint += "the traceback is in its log (stderr)."
    return _failed(f"{text} {hint}", ErrorPayload(error=text, hint=hint))


def _failed(text: str, payload: ErrorPayload) -> t.CallToolResult:
    return t.CallToolResult(
        content=[t.TextContent(type="text", text=shown(text, MAX_ANSWER_CHARS))],
        structured_content=payload.model_dump(mode="json", exclude_unset=True),
        is_error=True,
    )

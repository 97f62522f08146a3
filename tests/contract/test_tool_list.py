"""What every conversation pays for, and what a model chooses by: the list of the ten tools."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any, Literal
from urllib.parse import unquote
from xml.etree import ElementTree

import jsonschema
import pytest
from mcp_rig import in_memory
from pydantic import BaseModel

from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.server.answers import ErrorPayload
from hermes_rl_mcp.server.app import build_server
from hermes_rl_mcp.server.outline import _model, outline, result_of
from hermes_rl_mcp.server.schemas import published_input, published_output

HINTS = {
    "rl_list_environments": (True, False, True, True),
    "rl_select_environment": (False, False, True, False),
    "rl_get_current_config": (True, False, True, False),
    "rl_edit_config": (False, False, True, False),
    "rl_start_training": (False, False, False, True),
    "rl_check_status": (True, False, True, False),
    "rl_stop_training": (False, True, True, False),
    "rl_get_results": (True, False, True, False),
    "rl_list_runs": (True, False, True, False),
    "rl_test_inference": (False, False, False, True),
}
"""Reads only, destroys, idempotent, reaches out of this machine."""


async def wire(environ: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The list as it is sent."""
    async with in_memory(environ) as call:
        tools = call.listed.values()
        return {tool.name: tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools}


@pytest.mark.anyio
async def test_the_list_costs_a_conversation_little(environ: dict[str, str]) -> None:
    listed = await wire(environ)
    shown = [{key: tool[key] for key in ("name", "title", "description", "inputSchema")} for tool in listed.values()]
    assert len(json.dumps(shown).encode()) < 14_000, "what a model is shown"
    assert len(json.dumps({"tools": list(listed.values())}).encode()) < 24_000, "all that is sent"


@pytest.mark.anyio
async def test_each_says_when_to_use_it_what_comes_next_and_what_it_does(environ: dict[str, str]) -> None:
    for name, tool in (await wire(environ)).items():
        described = tool["description"]
        assert described.startswith("Use this "), name
        assert re.search(r"^Next: .*\brl_[a-z_]+", described, re.MULTILINE), name
        assert len(described.encode()) < 2000
        assert "  " not in described, "no indentation of the source"
        assert 3 < len(tool["title"]) < 30
        hints = tool["annotations"]
        keys = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
        assert tuple(hints[key] for key in keys) == HINTS[name]
        [icon] = tool["icons"]
        assert icon["mimeType"] == "image/svg+xml"
        drawing = unquote(icon["src"].removeprefix("data:image/svg+xml,"))
        assert not set(icon["src"]) & set(' <>"'), "an address, which clients check"
        assert ElementTree.fromstring(drawing)[0].get("d")
    assert len({tool["icons"][0]["src"] for tool in (await wire(environ)).values()}) == 10


@pytest.mark.anyio
async def test_each_argument_has_a_meaning_and_a_limit_and_none_is_a_union(environ: dict[str, str]) -> None:
    for name, tool in (await wire(environ)).items():
        jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
        for argument, part in tool["inputSchema"]["properties"].items():
            where = f"{name}.{argument}"
            assert len(part["description"]) > 8, where
            assert not {"anyOf", "$ref", "title"} & set(part), where
            kind = part.get("type")
            if kind == "string" and "enum" not in part and argument != "run_id":
                assert part["maxLength"], where
            if kind in ("integer", "number"):
                assert "minimum" in part, where
            if kind == "array":
                assert part["maxItems"], where
                assert part["items"]["type"] == "string", where


@pytest.mark.anyio
async def test_null_for_an_argument_that_may_be_left_out_is_understood(environ: dict[str, str]) -> None:
    async with in_memory(environ) as call:
        error = await call.error("rl_start_training", idempotency_key=None, resume_from=None, export_of=None)
        assert "rl_select_environment" in error["hint"]
        assert "not found" in (await call.error("rl_check_status", run_id="ffffffff", step=None))["error"]


def test_a_published_schema_is_never_narrower_than_the_model() -> None:
    from hermes_rl_mcp.contracts import results

    error = ErrorPayload.model_json_schema()
    for kind in results.Result.__subclasses__():
        schema = kind.model_json_schema()
        published = published_output(schema, error)
        jsonschema.Draft202012Validator.check_schema(published)
        assert set(schema["properties"]) <= set(published["properties"]), kind
        check = jsonschema.Draft202012Validator(published)
        assert check.is_valid({"error": "e"}), kind
        assert not check.is_valid({}) or not schema.get("required"), kind
        nulls = {n: None for n, part in schema["properties"].items() if {"type": "null"} in part.get("anyOf", ())}
        for name in nulls:
            jsonschema.Draft202012Validator(published["properties"][name]).validate(None)


def test_the_published_schemas_are_those_that_pydantic_would_give(environ: dict[str, str]) -> None:
    error = ErrorPayload.model_json_schema()
    server = build_server(Operations.from_environ(environ))
    for tool in server._tool_manager.list_tools():
        result = result_of(tool.fn)
        assert tool.output_schema == published_output(result.model_json_schema(), error), tool.name
        assert tool.fn_metadata.output_model is result
        _model(result, {})  # understood, not asked of pydantic


def test_an_annotation_without_a_rule_is_left_to_pydantic() -> None:
    class Odd(BaseModel):
        when: date
        kind: Literal["a", "b"] = "a"

    assert outline(Odd) == Odd.model_json_schema()


def test_of_an_argument_type_limits_default_and_meaning_are_published() -> None:
    given = {
        "properties": {
            "a": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}], "default": None, "title": "A"},
            "b": {"type": "integer", "minimum": 0, "default": 0, "description": "How many."},
            "c": {"items": {"type": "string", "enum": ["x"], "title": "C"}, "type": "array", "maxItems": 2},
        },
        "required": ["c"],
    }
    assert published_input(given) == {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 9},
            "b": {"type": "integer", "minimum": 0, "default": 0, "description": "How many."},
            "c": {"items": {"type": "string", "enum": ["x"]}, "type": "array", "maxItems": 2},
        },
        "required": ["c"],
    }

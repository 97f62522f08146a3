"""A model's arguments: read in the types of the schema, never changed in meaning, and refused in words it can use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.agent.arguments import coerced, prepared
from hermes_rl_mcp.agent.tools.builtin import builtin_tools
from hermes_rl_mcp.errors import InvalidValueError


@pytest.mark.parametrize(
    ("schema", "given", "wanted"),
    [
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, " -7 ", -7),
        ({"type": "integer"}, "42.0", 42),
        ({"type": "integer"}, 3.0, 3),
        ({"type": "integer"}, "4.5", "4.5"),
        ({"type": "number"}, "4.5", 4.5),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "string"}, 42, "42"),
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, {"a": 1}, '{"a": 1}'),
        ({"type": "array", "items": {"type": "string"}}, "a", ["a"]),
        ({"type": "array", "items": {"type": "string"}}, '["a", "b"]', ["a", "b"]),
        ({"type": "array", "items": {"type": "integer"}}, ["1", 2], [1, 2]),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, '{"n": "1"}', {"n": 1}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({}, "5", "5"),
    ],
    ids=str,
)
def test_a_value_is_read_in_the_type_of_its_schema(schema: dict[str, Any], given: Any, wanted: Any) -> None:
    found = coerced(schema, given)
    assert found == wanted
    assert type(found) is type(wanted)


def test_null_for_an_optional_argument_means_that_it_is_not_given() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    assert prepared("f", schema, {"a": "x", "b": None}) == {"a": "x"}
    with pytest.raises(InvalidValueError, match="argument a"):
        prepared("f", schema, {"a": None})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "'a' is a required property"),
        ({"a": "x", "b": "many"}, "argument b"),
        ({"a": "x", "c": 1}, "no argument 'c'"),
    ],
    ids=["missing", "type", "unknown"],
)
def test_what_does_not_fit_is_refused_with_the_arguments_there_are(args: dict[str, Any], says: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    with pytest.raises(InvalidValueError, match=says) as caught:
        prepared("f", schema, args)
    assert "a" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_a_model_writes_is_valid_afterwards_or_refused(data: st.DataObject) -> None:
    import jsonschema

    tool = data.draw(st.sampled_from(builtin_tools()))
    names = st.sampled_from([*tool.parameters["properties"], "other"])
    args = data.draw(st.dictionaries(names, JSON, max_size=4))
    try:
        found = prepared(tool.name, tool.parameters, args)
    except InvalidValueError:
        return
    jsonschema.Draft202012Validator(tool.parameters).validate(found)


def test_each_tool_has_a_valid_schema_of_an_object_and_a_description() -> None:
    import jsonschema

    for tool in builtin_tools():
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        assert tool.parameters["type"] == "object"
        assert len(tool.description) > 10, tool.name


ARGUMENTS = {
    "terminal": "command background timeout workdir pty notify_on_complete watch_patterns",
    "process": "action session_id data timeout offset limit",
    "read_file": "path offset limit",
    "write_file": "path content",
    "patch": "mode path old_string new_string replace_all patch",
    "search_files": "pattern target path file_glob limit offset output_mode context",
    "todo": "todos merge",
    "web_search": "query limit",
    "web_extract": "urls",
    "vision_analyze": "image_url question",
    "image_generate": "prompt aspect_ratio",
    "browser_click": "ref",
    "browser_type": "ref text",
    "browser_console": "clear expression",
}
"""Names that conversations recorded with the original have in them."""


def test_arguments_have_the_names_that_models_know() -> None:
    tools = {tool.name: tool for tool in builtin_tools()}
    assert {name: " ".join(tools[name].parameters["properties"]) for name in ARGUMENTS} == ARGUMENTS
    assert {name for name, tool in tools.items() if tool.result_size_chars != 100_000} == {"read_file"}

"""Tool calls out of text: each family's format, damage that costs only itself, text in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl_mcp.agent.interfaces import ToolCall
from hermes_rl_mcp.agent.parsers import PARSERS, Stream, get_parser, list_parsers, parser_for_model
from hermes_rl_mcp.errors import InvalidValueError

SEP = "<｜tool▁sep｜>"  # noqa: RUF001 - the model's own token
FORMATS = {
    "hermes": '<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
    "qwen": '<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>',
    "longcat": '<longcat_tool_call>{"name":"f","arguments":{"x":1}}</longcat_tool_call>',
    "mistral": '[TOOL_CALLS] [{"name":"f","arguments":{"x":1}}]',
    "llama3_json": '<|python_tag|>{"name":"f","parameters":{"x":1}}',
    "llama4_json": '{"name":"f","arguments":{"x":1}}',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"  # noqa: RUF001
    + SEP
    + 'f\n```json\n{"x":\n1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    "deepseek_v31": "<｜tool▁call▁begin｜>f" + SEP + '{"x":1}<｜tool▁call▁end｜>',  # noqa: RUF001
    "deepseek_v3_1": "<｜tool▁call▁begin｜>f" + SEP + '{"x":1}',  # noqa: RUF001
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x":1}<|tool_call_end|><|tool_calls_section_end|>',
    "glm45": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
}
TAGGED = [name for name in PARSERS if name not in ("llama3_json", "llama4_json")]


def test_the_thirteen_names_are_there_and_another_is_refused_by_naming_them() -> None:
    assert list_parsers() == sorted(FORMATS)
    with pytest.raises(InvalidValueError, match="no tool-call parser 'nous'") as caught:
        get_parser("nous")
    assert "qwen3_coder" in caught.value.hint


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_is_read_and_the_text_on_both_sides_of_it_stays(name: str) -> None:
    parsed = get_parser(name).parse(f"before {FORMATS[name]} after")
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [("f", {"x": 1})]
    assert not parsed.errors
    assert parsed.content is not None and parsed.content.split() == ["before", "after"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_a_model_thinks_of_calling_is_no_call(name: str) -> None:
    for thought in (f"<think>{FORMATS[name]}</think>no", f"<think>{FORMATS[name]}"):
        parsed = get_parser(name).parse(thought)
        assert (parsed.calls, parsed.content) == ([], thought)


def test_a_thought_that_the_template_opened_ends_at_its_closing_tag() -> None:
    parsed = get_parser("hermes").parse(f"perhaps {FORMATS['hermes']}? </think>{FORMATS['hermes']}")
    assert len(parsed.calls) == 1


def test_think_tags_within_an_argument_are_a_part_of_it() -> None:
    for value in ("<think></think></tool_call>", "a </think> b"):
        text = f'<tool_call>{{"name":"f","arguments":{{"x":"{value}"}}}}</tool_call>'
        [call] = get_parser("hermes").parse(text).calls
        assert json.loads(call.arguments) == {"x": value}


def test_arguments_can_always_be_encoded() -> None:
    [call] = get_parser("hermes").parse('<tool_call>{"name":"f","arguments":{"x":"\\ud800"}}</tool_call>').calls
    assert call.arguments.encode() == b'{"x": "\\ud800"}'


@pytest.mark.parametrize("name", sorted({"hermes", "qwen", "longcat", "mistral", "kimi_k2", "glm45", "glm47"}))
def test_a_damaged_block_is_said_to_be_one_and_the_others_count(name: str) -> None:
    good = FORMATS[name]
    opener = get_parser(name).openers[0]
    parsed = get_parser(name).parse(f"{good}{opener}{{'x'{good}")
    assert [call.name for call in parsed.calls] == ["f", "f"]
    assert len(parsed.errors) == 1 and parsed.errors[0].startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        pytest.param("hermes", '<tool_call>{"name":"f"}', "{}", id="unclosed_without_arguments"),
        pytest.param("hermes", '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}', '{"x": 1}', id="encoded_once"),
        pytest.param("hermes", '<tool_call>[{"name":"f","arguments":{}}]</tool_call>', "{}", id="list"),
        pytest.param("hermes", '<tool_call>{"name":"f","arguments":{}}}</tool_call>', "{}", id="one_brace_too_many"),
        pytest.param("mistral", '[TOOL_CALLS]f{"x":1}', '{"x": 1}', id="mistral_v11"),
        pytest.param("mistral", '[TOOL_CALLS]f[ARGS]{"x":1}', '{"x": 1}', id="mistral_args_token"),
        pytest.param("glm45", "<tool_call>f</tool_call>", "{}", id="glm45_without_arguments"),
        pytest.param("glm47", "<tool_call>f</tool_call>", "{}", id="glm47_without_arguments"),
        pytest.param("qwen3_coder", "<function=f><parameter=x>True", '{"x": true}', id="coder_unclosed"),
        pytest.param("qwen3_coder", "<function=f><parameter=x>1e3</parameter>", '{"x": "1e3"}', id="coder_text_stays"),
    ],
)
def test_what_models_get_slightly_wrong_is_understood(name: str, text: str, arguments: str) -> None:
    parsed = get_parser(name).parse(text)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", arguments)]
    assert (parsed.errors, parsed.content) == ([], None)


def test_the_schema_keeps_text_that_looks_like_a_number_text() -> None:
    schema = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
    for name in ("qwen3_coder", "glm45"):
        [call] = get_parser(name).parse(FORMATS[name], [schema]).calls
        assert json.loads(call.arguments) == {"x": "1"}


def test_ids_are_those_that_the_family_uses() -> None:
    assert get_parser("kimi_k2").parse(FORMATS["kimi_k2"]).calls[0].id == "functions.f:0"
    assert len(get_parser("mistral").parse(FORMATS["mistral"]).calls[0].id) == 9
    two = get_parser("hermes").parse(FORMATS["hermes"] * 2).calls
    assert two[0].id != two[1].id


def test_llama_reads_several_calls_and_leaves_other_json_alone() -> None:
    calls = '<|python_tag|>{"name":"f","parameters":{"y":{"name":"g","arguments":{}}}}; {"name":"h","arguments":{}}'
    assert [call.name for call in get_parser("llama3_json").parse(calls).calls] == ["f", "h"]
    other = 'The file holds {"name": "Ada", "age": 36}.'
    assert get_parser("llama3_json").parse(other).content == other
    assert get_parser("llama3_json").parse(other).calls == []


@pytest.mark.parametrize(
    ("model", "parser"),
    [
        ("Qwen/Qwen3-8B", "qwen"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("NousResearch/DeepHermes-3-Llama-3-3B-Preview", "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3_json"),
        ("zai-org/GLM-4.7-Flash", "glm47"),
        ("builtin:tiny", "hermes"),
    ],
)
def test_the_parser_follows_the_family_of_the_model(model: str, parser: str) -> None:
    assert parser_for_model(model) == parser


_NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab\n\"\\'é😀 ", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=4,
)
_CALLS = st.lists(st.tuples(_NAMES, st.dictionaries(_NAMES, _VALUES, max_size=2)), min_size=1, max_size=3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["glm45", "glm47"])
def test_keys_that_never_end_take_no_longer_the_more_there_are(name: str) -> None:
    assert not get_parser(name).parse("<tool_call>f\n<arg_key>" * 20_000).calls  # each once read to the end: minutes


_BY_JSON = sorted(set(PARSERS) - {"qwen3_coder", "glm45", "glm47"})


@settings(max_examples=40, deadline=None)
@given(calls=_CALLS, name=st.sampled_from(_BY_JSON))
def test_what_is_written_is_read_again(calls: list[tuple[str, dict[str, object]]], name: str) -> None:
    parser = get_parser(name)
    written = parser.render([ToolCall("", tool, json.dumps(arguments)) for tool, arguments in calls])
    parsed = parser.parse(written)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert not parsed.errors


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)))
def test_no_damage_makes_a_parser_raise_or_its_stream_show_a_mark(data: st.DataObject, name: str) -> None:
    parser = get_parser(name)
    marks = st.sampled_from(
        [*parser.openers, *parser.closers, FORMATS[name], "<think>", "</think>", "{", '"', "\ud800"]
    )
    text = "".join(data.draw(st.lists(marks | st.text(max_size=4), max_size=8)))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    text = text[:begin] + text[end:]
    parsed = parser.parse(text)
    for call in parsed.calls:
        assert call.name and call.id
    stream, shown, position = Stream(parser), "", 0
    while position < len(text):
        step = data.draw(st.integers(1, 7))
        shown += stream.feed(text[position : position + step])
        position += step
    assert text.startswith(shown)
    assert not any(mark in shown for mark in (*parser.openers, *parser.closers))
    assert [(c.name, c.arguments) for c in stream.end().calls] == [(c.name, c.arguments) for c in parsed.calls]

"""Toolsets, distributions and the choice of tools: names of the original, seeds that repeat, absences with reasons."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from hermes_rl_mcp.agent import toolbox
from hermes_rl_mcp.agent.distributions import (
    DISTRIBUTIONS,
    get_distribution,
    list_distributions,
    print_distribution_info,
    sample_toolsets_from_distribution,
    validate_distribution,
)
from hermes_rl_mcp.agent.interfaces import Tool
from hermes_rl_mcp.agent.toolbox import handle_function_call, sample_tools, select_tools
from hermes_rl_mcp.agent.toolsets import (
    BUILTIN,
    create_custom_toolset,
    get_all_toolsets,
    get_toolset,
    get_toolset_info,
    get_toolset_names,
    resolve_multiple_toolsets,
    resolve_toolset,
    validate_toolset,
)
from hermes_rl_mcp.errors import InvalidValueError
from tests.tool_parts import Caller

ECHO = Tool("echo", "mine", "Says it again", {"type": "object", "properties": {}}, lambda context, args: "again")


def test_a_set_resolves_to_its_tools_and_those_it_includes() -> None:
    assert resolve_toolset("debugging") == [
        *("terminal", "process", "web_search", "web_extract", "read_file", "write_file", "patch", "search_files")
    ]
    assert "web_search" in resolve_toolset("browser")
    assert resolve_toolset("web_tools") == resolve_toolset("web")
    assert resolve_toolset("web", {"web"}) == []
    assert resolve_toolset("none of it") == []
    assert set(resolve_toolset("all")) == set(resolve_toolset("*")) >= {"todo", "rl_start_training"}
    assert resolve_multiple_toolsets(["web", "search"]) == ["web_search", "web_extract"]


def test_a_circle_of_includes_ends() -> None:
    round_and_round = create_custom_toolset("a", "a", ["x"], ["a", "web"])
    assert resolve_toolset("a", toolsets=round_and_round) == ["x", "web_search", "web_extract"]


def test_a_custom_set_is_in_a_registry_of_its_own() -> None:
    mine = create_custom_toolset("mine", "Mine", ["todo"], ["web"])
    assert get_toolset("mine", mine) == {"description": "Mine", "tools": ["todo"], "includes": ["web"]}
    assert get_toolset("mine") is None and not validate_toolset("mine")
    assert get_toolset_info("mine", mine) == {
        "name": "mine",
        "description": "Mine",
        "direct_tools": ["todo"],
        "includes": ["web"],
        "resolved_tools": ["todo", "web_search", "web_extract"],
        "tool_count": 3,
        "is_composite": True,
    }
    assert set(get_all_toolsets(mine)) == {*get_toolset_names(), "mine"}
    with pytest.raises(InvalidValueError, match="already"):
        create_custom_toolset("web", "again")
    with pytest.raises(InvalidValueError, match="no toolset 'nothing'"):
        create_custom_toolset("other", "x", includes=["nothing"])


def test_each_tool_is_in_the_set_that_it_names() -> None:
    for tool in toolbox.tools_by_name().values():
        assert tool.name in resolve_toolset(tool.toolset)
    named = {tool for name in BUILTIN.names() if name != "rl" for tool in resolve_toolset(name)}
    assert named == set(toolbox.get_all_tool_names())


def test_what_cannot_be_had_is_left_out_with_its_reason() -> None:
    found = select_tools(["web", "todo", "rl"], settings={})
    assert found.toolbox.names() <= {"todo", "web_extract"}
    assert "SEARXNG_URL" in found.dropped["web_search"]
    assert "hermes-rl-mcp" in found.dropped["rl_start_training"]
    assert "rl" not in found.toolsets and "todo" in found.toolsets
    assert "web_search: no search is set up" in found.report


def test_disabled_sets_are_taken_off_last_and_unknown_names_are_errors() -> None:
    found = select_tools(["debugging"], ["web", "file"], settings={})
    assert found.toolbox.names() == {"terminal", "process"}
    with pytest.raises(InvalidValueError, match="did you mean 'terminal'"):
        select_tools(["terminel"], settings={})
    with pytest.raises(InvalidValueError, match="no toolset"):
        select_tools(["web"], ["nothing"], settings={})


def test_further_tools_are_a_set_of_their_own() -> None:
    found = select_tools(["mine", "todo"], settings={}, extra=[ECHO])
    assert found.toolbox.names() == {"echo", "todo"}
    assert "echo" in select_tools(settings={}, extra=[ECHO]).toolbox.names()
    assert "echo" not in select_tools(None, ["mine"], settings={}, extra=[ECHO]).toolbox.names()


def test_there_are_17_distributions_with_the_originals_numbers() -> None:
    assert len(DISTRIBUTIONS) == 17
    assert get_distribution("science") == {
        "description": "scientific work: web, commands and files",
        "toolsets": {"web": 94, "browser": 50, "vision": 65, "image_gen": 15, "terminal": 94, "file": 94},
    }
    assert get_distribution("reasoning") is not None
    assert get_distribution("nothing") is None and not validate_distribution("nothing")
    assert set(list_distributions()) == set(DISTRIBUTIONS)
    written = io.StringIO()
    print_distribution_info("minimal", written)
    assert "web        100 %" in written.getvalue()


def test_a_seed_repeats_a_draw_and_draws_come_as_often_as_they_should() -> None:
    draws = [sample_toolsets_from_distribution("development", seed=seed) for seed in range(2000)]
    assert draws == [sample_toolsets_from_distribution("development", seed=seed) for seed in range(2000)]
    counts = Counter(one for draw in draws for one in draw)
    assert abs(counts["terminal"] / 2000 - 0.8) < 0.05
    assert abs(counts["vision"] / 2000 - 0.1) < 0.05
    rng = random.Random(3)
    assert len({tuple(sample_toolsets_from_distribution("balanced", rng=rng)) for _ in range(50)}) > 10


def test_what_is_missing_changes_nothing_for_the_others() -> None:
    for seed in range(200):
        whole = sample_toolsets_from_distribution("balanced", seed=seed)
        part = sample_toolsets_from_distribution("balanced", seed=seed, available=["terminal", "file", "web"])
        kept = [one for one in whole if one in ("terminal", "file", "web")]
        assert part == (kept or ["web"])


def test_where_nothing_is_drawn_the_most_likely_one_is_taken_and_unknown_names_are_errors() -> None:
    assert sample_toolsets_from_distribution("default", available=[]) == []
    drawn = [sample_toolsets_from_distribution("reasoning", seed=seed) for seed in range(500)]
    assert all(drawn)
    with pytest.raises(ValueError, match="no distribution 'nothing'"):
        sample_toolsets_from_distribution("nothing")


def test_tools_of_a_draw_can_all_be_called() -> None:
    for seed in range(30):
        found = sample_tools("terminal_tasks", seed=seed, settings={"HERMES_RL_SEARCH_CORPUS": "/corpus"})
        assert not {"vision_analyze", "image_generate"} & found.toolbox.names()
        assert found.toolbox.names()
    with pytest.raises(InvalidValueError, match="can be had here"):
        sample_tools("minimal", ["web"], settings={})


def test_a_call_by_name_gives_json_and_never_raises(tmp_path: Path) -> None:
    caller = Caller(tmp_path)

    def call(name: str, args: dict[str, object], **more: list[str]) -> dict[str, object]:
        found = json.loads(handle_function_call(name, args, context=caller.context, **more))
        assert isinstance(found, dict)
        return found

    assert call("terminal", {"command": "echo hi", "timeout": "20"})["output"] == "hi\n"
    assert "Unknown tool 'nothing'" in str(call("nothing", {})["error"])
    assert "Unknown tool 'todo'" in str(call("todo", {}, enabled_tools=["terminal"])["error"])
    assert "must be handled by the agent loop" in str(call("memory", {})["error"])
    assert "cannot be had here" in str(call("web_search", {"query": "x"})["error"])
    assert "required" in str(call("terminal", {})["error"])


def test_the_originals_questions_about_what_there_is() -> None:
    assert toolbox.get_toolset_for_tool("patch") == "file"
    assert toolbox.tool_to_toolset_map()["todo"] == "todo"
    assert toolbox.check_toolset_requirements({})["web"] is False
    assert toolbox.check_toolset_requirements({})["terminal"] is True
    assert toolbox.get_available_toolsets({})["vision"]["available"] is False
    there, away = toolbox.check_tool_availability(quiet=True, settings={})
    assert "terminal" in there
    assert "vision" in {one["name"] for one in away}
    names = [one["function"]["name"] for one in toolbox.get_tool_definitions(["file", "web"], ["web"], settings={})]
    assert names == ["read_file", "write_file", "patch", "search_files"]

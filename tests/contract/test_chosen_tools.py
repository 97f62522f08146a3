"""Which tools a server offers: what is not offered is not listed, and calling it says why."""

from __future__ import annotations

import pytest
from mcp_rig import in_memory, over_stdio

from hermes_rl_mcp.errors import InvalidValueError

READING = {"rl_list_environments", "rl_get_current_config", "rl_check_status", "rl_get_results", "rl_list_runs"}


@pytest.mark.anyio
async def test_a_read_only_server_lists_only_tools_that_read(environ: dict[str, str]) -> None:
    async with over_stdio({**environ, "HERMES_RL_READ_ONLY": "1"}) as call:
        assert set(call.listed) == READING
        error = await call.error("rl_stop_training", run_id="00000001")
        assert "--read-only" in error["error"]
        assert (await call("rl_list_runs"))["count"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({"tools": ["rl_list_runs,rl_start_training"]}, {"rl_list_runs", "rl_start_training"}),
        ({"tools": ["rl_list_runs", "rl_start_training"], "read_only": True}, {"rl_list_runs"}),
        ({"exclude_tools": ["rl_list_runs"], "read_only": True}, READING - {"rl_list_runs"}),
        ({"tools": ["rl_list_runs", "rl_get_results"], "exclude_tools": ["rl_get_results"]}, {"rl_list_runs"}),
    ],
    ids=["tools", "tools read-only", "exclude read-only", "tools exclude"],
)
async def test_tools_are_chosen_by_name_and_read_only_wins(
    environ: dict[str, str], flags: dict[str, object], left: set[str]
) -> None:
    async with in_memory(environ, **flags) as call:
        assert set(call.listed) == left
        error = await call.error("rl_stop_training", run_id="00000001")
        assert "rl_stop_training is not available" in error["error"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tools": ["rl_list_run"]}, "no tool 'rl_list_run'"),
        ({"exclude_tools": ["stop"]}, "no tool 'stop'"),
        ({"tools": ["rl_stop_training"], "read_only": True}, "No tool is left"),
    ],
    ids=["tools", "exclude", "nothing left"],
)
@pytest.mark.anyio
async def test_a_choice_that_makes_no_sense_is_an_error_at_the_start(
    environ: dict[str, str], flags: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidValueError, match=says):
        async with in_memory(environ, **flags):
            pass

"""rl_edit_config judges a value beside those that were set before, as a run will see them."""

from __future__ import annotations

import pytest
from mcp_rig import in_memory


@pytest.mark.anyio
async def test_a_value_that_does_not_fit_an_earlier_one_is_refused_in_one_sentence(
    environ: dict[str, str],
) -> None:
    async with in_memory(environ) as call:
        await call("rl_select_environment", name="arithmetic")
        await call("rl_edit_config", field="mixed_up_to", value=4)
        assert (await call("rl_edit_config", field="difficulty", value="3"))["value"] == 3
        refused = await call.error("rl_edit_config", field="mixed_up_to", value=2)
        assert "mixed_up_to = 2 lies below difficulty = 3" in refused["error"]
        assert "rollout_server_url" not in str(refused), "the whole configuration is no part of the sentence"
        assert (await call("rl_edit_config", field="mixed_up_to", value=3))["value"] == 3

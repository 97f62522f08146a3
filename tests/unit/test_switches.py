"""True and false are no numbers: pydantic would take them for 1 and 0."""

from __future__ import annotations

import pytest

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.describe import validate
from hermes_rl_mcp.errors import InvalidValueError
from hermes_rl_mcp.runs.configuration.fields import coerce_library_value


@pytest.mark.parametrize("name", ["lora_rank", "learning_rate"])
def test_a_trainer_field_that_is_a_number_takes_no_switch(name: str) -> None:
    with pytest.raises(InvalidValueError, match="must be a number"):
        coerce_library_value(TrainerConfig, name, True)
    assert coerce_library_value(TrainerConfig, name, "1") == 1.0
    assert coerce_library_value(TrainerConfig, "gradient_checkpointing", True) is True


def test_an_environment_field_that_is_a_number_takes_no_switch() -> None:
    reply = validate(BaseEnv, {"group_size": True, "steps_per_eval": "5", "include_messages": True})
    assert reply.errors == {"group_size": "Input should be a number, found True"}
    assert reply.values == {"steps_per_eval": 5, "include_messages": True} and not reply.ok

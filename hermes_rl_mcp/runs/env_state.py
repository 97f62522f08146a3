"""What the environment of a run says of itself, for the supervisor and for readers."""

from __future__ import annotations

from pydantic import ValidationError

from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.paths import RunPaths


def read_env_state(paths: RunPaths) -> EnvState | None:
    """How far it is with its groups; None if it says nothing that can be read."""
    try:
        return EnvState.model_validate_json(read_file(paths.env_state))
    except (OSError, ValidationError):
        return None

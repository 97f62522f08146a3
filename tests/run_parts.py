"""What several tests need of a run that nobody carries out."""

from __future__ import annotations

from typing import Any

from hermes_rl_mcp.contracts.config import TrainerConfig
from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.files import now

SIZES = {"total_steps": 3, "group_size": 2, "batch_size": 4, "max_token_length": 8}


def run_request(run_id: str, **changes: Any) -> RunRequest:
    """The request of a small run on the embedded model."""
    values: dict[str, Any] = {
        "run_id": run_id,
        "created_at": now(),
        "environment": "e",
        "env_file": "/e.py",
        "env_class": "E",
        "env_sha256": "0",
        "profile": "local",
        "base_model": "builtin:tiny",
        "model_path": "m",
        "tokenizer_name": "t",
        "env": SIZES,
        "trainer": TrainerConfig(),
    }
    return RunRequest.model_validate({**values, **changes})

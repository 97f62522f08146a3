"""Environments of the short-lived children that operations start: an allow-list, like that of a run's processes."""

from __future__ import annotations

from collections.abc import Mapping

from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.redact import SECRET_PREFIX
from hermes_rl_mcp.runs.specs import CHILD_COMMANDS, supervisor_environ

_FOR_TRAINING = ("WANDB_", SECRET_PREFIX, CHILD_COMMANDS)
"""Beginnings of names of variables."""


def helper_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """For a child that runs environment code: hub access, but no W&B key. One thread, which waits without spinning."""
    chosen = {k: v for k, v in supervisor_environ(home, environ).items() if not k.startswith("WANDB_")}
    return {**chosen, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def program_environ(home: Home, environ: Mapping[str, str]) -> dict[str, str]:
    """For a program of the trainer that is no part of a run: what a run's trainer gets, but for what serves training
    alone."""
    chosen = supervisor_environ(home, environ)
    mine = {name: value for name, value in chosen.items() if not name.startswith(_FOR_TRAINING)}
    return {**mine, "OMP_WAIT_POLICY": "PASSIVE"}

"""Which hosts outside of this machine are sent something of a run, as far as its configuration says.

What an environment's own code sends elsewhere without a setting for it cannot be known; it is code.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from hermes_rl_mcp.contracts.runs import RunRequest
from hermes_rl_mcp.runs.configuration.addresses import hosts_of, is_here

_WANDB = "api.wandb.ai"


def receivers(request: RunRequest, environ: Mapping[str, str]) -> list[str]:
    """``host: what it gets``, one entry for each."""
    found: dict[str, str] = {}
    if request.trainer.use_wandb:
        host = urlsplit(environ.get("WANDB_BASE_URL", "")).hostname or _WANDB
        found[host] = "metrics and settings (use_wandb)"
    for name, value in request.env.items():
        for host in hosts_of(value):
            if not is_here(host):
                found.setdefault(host, f"what the environment sends there ({name})")
    return [f"{host}: {what}" for host, what in found.items()]

"""A page for people: runs, their curves, what was sampled, logs, and a stop button. Rendered here, needs no script.

Invariant: nothing that a model, an environment or a log wrote reaches a browser as anything but text, and nothing
changes a run but a request that carries the token and comes from a page of ours.
"""

from hermes_rl_mcp.dashboard.addresses import BASE, routes

__all__ = ["BASE", "routes"]

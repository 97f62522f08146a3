"""``python -P -m hermes_rl_mcp.plots``: draws the curves of runs. A program of its own, since it needs numpy."""

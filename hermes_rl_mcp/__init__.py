"""Train language models by reinforcement learning on your own machine, from any MCP client."""

__version__ = "0.1.0"

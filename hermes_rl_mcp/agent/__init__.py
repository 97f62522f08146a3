"""Multi-turn tool use: agent loop, tools, sandboxes, toolsets, tool-call parsers. Knows nothing of training."""

"""What the ten tools do, as typed async functions. Knows nothing of MCP."""

"""The MCP server: thin handlers over operations. The only package, besides two client commands, that knows mcp."""

"""What can be read without calling a tool: environments, and runs part by part."""

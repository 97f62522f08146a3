"""The tools that a model can call: one module for each kind, whose ``TOOLS`` are what it has."""

"""``python -P -m hermes_rl_mcp.dataset_viewer``: columns, sizes and first rows of a data set. A program of its own: it
may need pyarrow and ``datasets``, and a file may take longer or more memory than it should."""

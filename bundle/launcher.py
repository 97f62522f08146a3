"""What a bundle starts: its own server, or that of a Python that has all that training needs.

Invariant: a variable that the person left empty does not exist for the server.
"""

from __future__ import annotations

import os

PYTHON = "HERMES_RL_BUNDLE_PYTHON"
_STDIO = ["--transport", "stdio"]


def main() -> None:
    for name in [name for name in os.environ if name.startswith("HERMES_")]:
        if not os.environ[name].strip() or os.environ[name].startswith("${"):  # some hosts leave the placeholder
            del os.environ[name]
    if python := os.environ.pop(PYTHON, None):
        os.execv(python, [python, "-P", "-m", "hermes_rl_mcp.server", *_STDIO])
    from hermes_rl_mcp.server.__main__ import main as serve

    serve(_STDIO)


if __name__ == "__main__":
    main()

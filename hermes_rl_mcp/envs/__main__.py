"""``python -P -m hermes_rl_mcp.envs FILE.py[:Class] serve|process|evaluate|describe``."""

from __future__ import annotations

import sys

from hermes_rl_mcp.envs.commands import main

if __name__ == "__main__":
    main(sys.argv[1:])

"""``python -P -m hermes_rl_mcp.plots RUN_DIR [RUN_DIR ...] OUT.png``: one picture of one run, or of several.

``-`` as OUT.png is stdout, which then carries the picture and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hermes_rl_mcp import lifeline


def main(arguments: Sequence[str]) -> None:
    """Exits with a sentence on stderr if the arguments make no sense."""
    lifeline.watch(os.environ)
    if len(arguments) < 2:
        sys.exit("usage: python -P -m hermes_rl_mcp.plots RUN_DIR [RUN_DIR ...] OUT.png")
    *folders, out = arguments
    picture_fd = os.dup(1) if out == "-" else os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.dup2(2, 1)  # whatever a library prints
    from hermes_rl_mcp.plots.curves import read_run
    from hermes_rl_mcp.plots.drawing import NAMES, draw

    picture = draw([read_run(Path(folder), NAMES) for folder in folders])
    with os.fdopen(picture_fd, "wb") as file:
        file.write(picture)


if __name__ == "__main__":
    main(sys.argv[1:])

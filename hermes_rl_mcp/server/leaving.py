"""How the server's process ends: at once, with code 0, whatever its threads wait for. Runs go on."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import NoReturn

log = logging.getLogger("hermes_rl_mcp.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 0.5
"""Between two looks at the parent."""


def leave(why: str) -> NoReturn:
    """Without waiting for anything: a thread that reads stdin or runs a tool blocks every gentler end."""
    log.info("leaving (%s); runs go on", why)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def leave_on_signals() -> None:
    """Until a transport puts its own handlers in their place: an end during the start is an end without a traceback."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))


def watch_parent(look_s: float = _LOOK_S) -> None:
    """Leave when the process that started this one is gone.

    Whoever else holds the other end of stdin would keep an orphan waiting for ever. A server that somebody detached
    on purpose has a parent that lives, too: the one that adopted it before it began to look.
    """
    parent = os.getppid()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(look_s):
            if os.getppid() != parent:
                leave(f"the process that started it ({parent}) is gone")

    threading.Thread(target=look, name="parent", daemon=True).start()

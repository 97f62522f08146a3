"""A process that must not outlive its parent watches a pipe that ends when the parent does.

The parent passes the read end by number in ``HERMES_RL_LIFELINE_FD`` and keeps the write end to itself. When the
parent dies, however it dies, the kernel closes the write end; the child then asks itself to stop and, after a grace
period, stops without asking.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

VARIABLE = "HERMES_RL_LIFELINE_FD"
GRACE_S = 10.0
"""Between SIGTERM to ourselves and leaving without clean-up: enough to write a checkpoint of a small adapter."""


@contextmanager
def held() -> Iterator[int]:
    """For the parent: the read end to hand to a child. The pipe ends with this block, or with this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(writing)
        os.close(reading)


def watch(environ: MutableMapping[str, str], grace_s: float = GRACE_S) -> bool:
    """Start watching if the parent gave a pipe. Takes the variable out, so that grandchildren do not see it.

    Returns whether there was one. Raises ValueError if the variable is not the number of an open descriptor.
    """
    value = environ.pop(VARIABLE, None)
    if value is None:
        return False
    try:
        fd = int(value)
        os.set_inheritable(fd, False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{VARIABLE}={value!r} is not an open file descriptor") from error
    threading.Thread(target=_wait, args=(fd, grace_s), name="lifeline", daemon=True).start()
    return True


def _wait(fd: int, grace_s: float) -> None:
    while os.read(fd, 4096):
        pass
    gone = threading.Timer(grace_s, os._exit, args=(70,))
    gone.daemon = True
    gone.start()
    os.kill(os.getpid(), signal.SIGTERM)

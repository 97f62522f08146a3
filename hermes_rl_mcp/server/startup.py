"""Gets the server up in the least time, because a client waits for it at every start.

Importing the SDK builds validators for several hundred message types of two protocol versions, of which a session uses
a few dozen. In this block they are built at first use instead (pydantic's ``defer_build``), and no garbage is collected
while so many objects are made that all stay. Together about a tenth of the time from start to ``tools/list``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict


@contextmanager
def quick_start() -> Iterator[None]:
    """For the duration of the block; what was set before is set again after it."""
    usual = BaseModel.model_config
    was_enabled = gc.isenabled()
    gc.disable()
    BaseModel.model_config = ConfigDict(**usual, defer_build=True)
    try:
        yield
    finally:
        BaseModel.model_config = usual
        gc.freeze()
        if was_enabled:
            gc.enable()

"""``python -P -m hermes_rl_mcp.dataset_viewer REQUEST``: reads a ViewRequest, writes a ViewReply to stdout.

Both are JSON. Stdout carries the reply and nothing else. Memory and computing time are bounded, whatever the data is.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Sequence

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.datasets import DatasetInfo, ViewFailure, ViewReply, ViewRequest
from hermes_rl_mcp.dataset_viewer.failing import ViewError

_MEMORY_BYTES = 8 * 2**30
"""Of addresses: libraries reserve far more than they use."""
_CPU_S = 60


def main(arguments: Sequence[str]) -> None:
    lifeline.watch(os.environ)
    if len(arguments) != 1:
        sys.exit("usage: python -P -m hermes_rl_mcp.dataset_viewer REQUEST")
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR)
    _bound(resource.RLIMIT_AS, _MEMORY_BYTES)
    _bound(resource.RLIMIT_CPU, _CPU_S)
    _bound(resource.RLIMIT_CORE, 0)
    request = ViewRequest.model_validate_json(arguments[0])
    try:
        reply = ViewReply(found=_view(request))
    except ViewError as error:
        reply = ViewReply(failure=error.failure)
    except MemoryError:
        gib = _MEMORY_BYTES // 2**30
        reply = ViewReply(failure=ViewFailure(kind="invalid", error=f"Reading it takes more than {gib} GiB of memory."))
    with os.fdopen(reply_fd, "wb") as file:
        file.write(reply.model_dump_json().encode())
    sys.stderr.flush()
    os._exit(0)  # threads of a download that was given up would keep the process


def _view(request: ViewRequest) -> DatasetInfo:
    if request.path is None:
        from hermes_rl_mcp.dataset_viewer import hub  # imports a large library

        return hub.view(request)
    from hermes_rl_mcp.dataset_viewer import local

    return local.view(request)


def _bound(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, hard))


if __name__ == "__main__":
    main(sys.argv[1:])

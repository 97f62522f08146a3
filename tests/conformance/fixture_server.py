"""Our server with the official suite's own tools, prompts and resources on it: ``python fixture_server.py PORT``.

The suite's fixtures ask for things that the product has no use for (sampling, audio, broken streams). Here they run on
the product's server class, tools and all, so that what passes here passes in the product.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import fixture_asking
import fixture_content
import fixture_rounds
import uvicorn
from event_memory import EventMemory
from mcp import MCPDeprecationWarning
from mcp.server.transport_security import TransportSecuritySettings

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.options import Flags
from hermes_rl_mcp.server.app import build_server
from hermes_rl_mcp.server.gate import Gate, Guarded

_RETRY_MS = 100
"""How soon a client of a stream that we closed comes back."""


def main() -> None:
    lifeline.watch(os.environ)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    warnings.simplefilter("ignore", MCPDeprecationWarning)  # the suite tests what newer clients do without
    server = build_server(Operations.from_environ(os.environ, Flags()))
    for part in (fixture_content, fixture_asking, fixture_rounds):
        part.register(server)
    off = TransportSecuritySettings(enable_dns_rebinding_protection=False)  # as in the product: the gate does it
    app = server.streamable_http_app(event_store=EventMemory(), retry_interval=_RETRY_MS, transport_security=off)
    guarded = Guarded(app, Gate())
    uvicorn.run(guarded, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()

"""``hermes-rl-mcp``: serves MCP over stdio (default), or over SSE and streamable HTTP.

Stdout is the protocol's. The server leaves within a second when its client closes stdin or a signal comes; runs go on,
they belong to nobody's process group. Heavy imports come after the arguments are known to be good.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.server import wire
from hermes_rl_mcp.server.flags import flags_of, parser, secrets_of, serving
from hermes_rl_mcp.server.leaving import leave_on_signals
from hermes_rl_mcp.server.startup import HTTP_SERVER, quick_start, without

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOG_BYTES = 5_000_000


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``hermes-rl-mcp``."""
    flags = flags_of(parser().parse_args(argv))
    ends = wire.take()  # before anything that may print
    leave_on_signals()
    os.umask(0o077)  # for all that this server and its children write
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_FORMAT, force=True)
    try:
        with quick_start():
            from hermes_rl_mcp.operations.operations import Operations
            from hermes_rl_mcp.operations.settings import load_settings

            operator = load_settings(os.environ, flags)
            how = serving(operator.given)
            if how.log_file:
                _log_to(how.log_file)
            operator = replace(operator, environ=secrets_of(how, operator.environ))
            with without(HTTP_SERVER) if how.transport == "stdio" else nullcontext():
                from hermes_rl_mcp.server.app import build_server
            server = build_server(Operations(operator))
        if how.transport == "stdio":
            from hermes_rl_mcp.server import serving_stdio

            serving_stdio.serve(server, ends)
        else:
            from hermes_rl_mcp.server import serving_http

            serving_http.serve(server, how)
    except HermesRLError as error:
        sys.stderr.write(f"hermes-rl-mcp: error: {error}\n")
        sys.exit(2)


def _log_to(path: Path) -> None:
    """Beside stderr, which most clients throw away. Two files at most: the newest and the one before."""
    from logging.handlers import RotatingFileHandler

    from hermes_rl_mcp.errors import InvalidValueError
    from hermes_rl_mcp.files import make_private_dir

    try:
        make_private_dir(path.parent)
        handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(
            f"--log-file {path} cannot be written: {error.strerror}.", hint="Name another file."
        ) from error
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().addHandler(handler)


if __name__ == "__main__":
    main()

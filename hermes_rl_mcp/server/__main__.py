"""``hermes-rl-mcp``: serves MCP over stdio (default), SSE or streamable HTTP.

Stdout is the protocol's. The server leaves within a second when its client closes stdin or a signal comes; runs go on,
they belong to nobody's process group. Heavy imports come after the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from hermes_rl_mcp import __version__
from hermes_rl_mcp.loopback import port_number
from hermes_rl_mcp.server.startup import quick_start

if TYPE_CHECKING:
    from hermes_rl_mcp.server.app import HermesServer

log = logging.getLogger("hermes_rl_mcp.server")

TRANSPORTS = ("stdio", "sse", "streamable-http")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHUTDOWN_S = 3
"""Open event streams would keep an HTTP server alive for ever."""


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Every flag has a variable of the same meaning; the flag wins."""
    made = argparse.ArgumentParser(
        prog="hermes-rl-mcp", description="MCP server that trains language models by reinforcement learning."
    )
    made.add_argument("--version", action="version", version=f"hermes-rl-mcp {__version__}")
    made.add_argument("--profile", help="local or hermes: what is locked (HERMES_RL_PROFILE)")
    made.add_argument(
        "--env-dir", action="append", default=[], help="folder with environments; repeatable (HERMES_RL_ENV_DIRS)"
    )
    made.add_argument(
        "--data-dir",
        action="append",
        default=[],
        help="folder whose data sets the agent may look into; repeatable (HERMES_RL_DATA_DIRS)",
    )
    made.add_argument("--session", help="name of the selection shared by clients (HERMES_RL_SESSION)")
    made.add_argument("--lock", action="append", default=[], metavar="NAME=VALUE", help="lock a field (HERMES_RL_LOCK)")
    made.add_argument("--unlock", action="append", default=[], metavar="NAME", help="unlock a field (HERMES_RL_UNLOCK)")
    made.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="PATTERN",
        help="let the agent choose these models (HERMES_RL_ALLOW_MODELS)",
    )
    for name, what in (("hours", "hours"), ("disk-gib", "GiB of disk"), ("gpu-memory-gib", "GiB of GPU memory")):
        for kind, does in (("max", "refuse"), ("ask", "ask a person before")):
            made.add_argument(
                f"--{kind}-{name}",
                metavar="N",
                help=f"{does} a run that is estimated to take more {what} "
                f"(HERMES_RL_{kind.upper()}_{name.upper().replace('-', '_')})",
            )
    made.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default=environ.get("HERMES_RL_TRANSPORT", "stdio"),
        help="(HERMES_RL_TRANSPORT)",
    )
    made.add_argument(
        "--host", default=environ.get("HERMES_RL_HOST", "127.0.0.1"), help="loopback only (HERMES_RL_HOST)"
    )
    made.add_argument(
        "--port", type=port_number, default=environ.get("HERMES_RL_PORT", "8765"), help="(HERMES_RL_PORT)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``hermes-rl-mcp``."""
    arguments = parser(os.environ)
    options = arguments.parse_args(argv)
    os.umask(0o077)  # for all that this server and its children write
    if options.transport not in TRANSPORTS:  # a default from the environment is not checked by argparse
        arguments.error(f"HERMES_RL_TRANSPORT={options.transport} is not one of {', '.join(TRANSPORTS)}")
    if options.transport != "stdio" and options.host not in LOOPBACK:
        arguments.error(f"--host {options.host}: this server listens on loopback only ({', '.join(LOOPBACK)})")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    server = _build(options, arguments)
    if options.transport == "stdio":
        _serve_stdio(server)
    else:
        _serve_http(server, options.transport, options.host, options.port)


def _build(options: argparse.Namespace, arguments: argparse.ArgumentParser) -> HermesServer:
    with quick_start():
        from hermes_rl_mcp.errors import InvalidValueError
        from hermes_rl_mcp.operations.operations import Operations
        from hermes_rl_mcp.operations.settings import Flags
        from hermes_rl_mcp.server.app import build_server

        flags = Flags(
            profile=options.profile,
            session=options.session,
            env_dirs=options.env_dir,
            data_dirs=options.data_dir,
            lock=options.lock,
            unlock=options.unlock,
            allow_models=options.allow_model,
            max_hours=options.max_hours,
            max_disk_gib=options.max_disk_gib,
            max_gpu_memory_gib=options.max_gpu_memory_gib,
            ask_hours=options.ask_hours,
            ask_disk_gib=options.ask_disk_gib,
            ask_gpu_memory_gib=options.ask_gpu_memory_gib,
        )
        try:
            return build_server(Operations.from_environ(os.environ, flags))
        except InvalidValueError as error:
            arguments.error(str(error))


def _serve_stdio(server: HermesServer) -> NoReturn:
    import anyio

    anyio.run(_stdio, server)
    _leave("the client closed its end")


async def _stdio(server: HermesServer) -> None:
    import asyncio

    import anyio
    from mcp.server.stdio import stdio_server

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _leave, signal.Signals(number).name)
    low = server._lowlevel_server  # the SDK's own run() gives no say over signals
    try:
        async with stdio_server() as (reading, writing):
            try:
                await low.run(reading, writing, low.create_initialization_options())
            except anyio.get_cancelled_exc_class():  # an answer could not be written, and stdin may stay open for ever
                _leave("the client reads no answers any more")
    except* OSError as errors:  # the client went while its last answer was under way
        log.info("the last answer was not taken: %s", errors.exceptions[0])


def _leave(why: str) -> NoReturn:
    """At once: the thread that reads stdin blocks every gentler end."""
    log.info("leaving (%s); runs go on", why)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _serve_http(server: HermesServer, transport: str, host: str, port: int) -> None:
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    hosts = ["127.0.0.1", "localhost", "[::1]"]
    security = TransportSecuritySettings(
        allowed_hosts=[f"{name}:*" for name in hosts], allowed_origins=[f"http://{name}:*" for name in hosts]
    )
    if transport == "sse":
        app = server.sse_app(host=host, transport_security=security)
    else:
        app = server.streamable_http_app(host=host, transport_security=security)
    path = "/sse" if transport == "sse" else "/mcp"
    log.info("serving on http://%s:%d%s", host, port, path)
    uvicorn.run(app, host=host, port=port, log_level="warning", log_config=None, timeout_graceful_shutdown=_SHUTDOWN_S)


if __name__ == "__main__":
    main()

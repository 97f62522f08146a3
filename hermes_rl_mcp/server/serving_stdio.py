"""Serves one client over stdin and stdout until it goes, a signal comes, or whoever started this process is gone."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, NoReturn

import anyio

from hermes_rl_mcp.server import wire
from hermes_rl_mcp.server.leaving import SIGNALS, leave, watch_parent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hermes_rl_mcp.server.app import HermesServer

log = logging.getLogger("hermes_rl_mcp.server")

_ANSWER_S = 1.0
_LAST_ANSWERS_S = 0.5
"""After the client closed its end: for answers under way, which a client in a shell pipe still reads."""


def serve(server: HermesServer, ends: wire.Wire) -> NoReturn:
    watch_parent()
    anyio.run(_serve, server, ends)
    leave("the client closed its end")


async def _serve(server: HermesServer, ends: wire.Wire) -> None:
    from mcp.server.stdio import stdio_server
    from mcp.shared.message import SessionMessage

    from hermes_rl_mcp.server.unreadable import answer_to

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, leave, signal.Signals(number).name)
    low = server._lowlevel_server  # the SDK's own run() gives no say over signals and stdout

    def client_left() -> None:
        loop.call_later(_LAST_ANSWERS_S, leave, "the client closed its end")

    answered: list[Callable[[SessionMessage], Awaitable[None]]] = []  # where answers go, once the SDK has made it

    async def answered_here(line: str) -> bool:
        if (answer := answer_to(line)) is None:
            return False
        for send in answered:
            with anyio.move_on_after(_ANSWER_S):  # who reads no answers must not keep us from seeing that they left
                await send(SessionMessage(answer))
        return True

    reading, writing = wire.opened(ends, client_left, answered_here)
    try:
        async with stdio_server(reading, writing) as (messages, answers):
            answered.append(answers.send)
            try:
                await low.run(messages, answers, low.create_initialization_options())
            except anyio.get_cancelled_exc_class():  # an answer could not be written, and stdin may stay open for ever
                leave("the client reads no answers any more")
    except* OSError as errors:  # the client went while its last answer was under way
        log.info("the last answer was not taken: %s", errors.exceptions[0])

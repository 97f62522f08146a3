"""Messages of streams by number, so that a client whose stream was closed can ask for what it missed."""

from __future__ import annotations

from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp.types import JSONRPCMessage


class EventMemory(EventStore):
    """Keeps everything: a suite's run is short."""

    def __init__(self) -> None:
        self._kept: list[tuple[StreamId, JSONRPCMessage | None]] = []

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        self._kept.append((stream_id, message))
        return str(len(self._kept))

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        seen = int(last_event_id) if last_event_id.isdigit() else 0
        if not 1 <= seen <= len(self._kept):
            return None
        stream = self._kept[seen - 1][0]
        for number, (of, message) in enumerate(self._kept[seen:], start=seen + 1):
            if of == stream and message is not None:  # None marks where a stream began
                await send_callback(EventMessage(message, str(number)))
        return stream

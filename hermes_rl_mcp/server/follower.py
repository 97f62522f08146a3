"""Looks once per interval at the files behind the resources that somebody follows, and publishes what has changed.

It follows files, not processes: runs that another server started, or an earlier one that is gone, count alike. It runs
only while somebody follows something, and keeps one stamp per address.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, SubscriptionBus

from hermes_rl_mcp.errors import HermesRLError
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.server.resources.serving import Found, Resources
from hermes_rl_mcp.server.resources.watching import Look, Stamp, listing

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""From one look to the next, and so the least time between two notes of the same resource."""
_LIST_LOOKS = 2
"""At every second look, the list of resources, too."""
_CLOSE_S = 5.0
"""From one look after a run's supervisor to the next: if it died, reading the run is what closes it."""

Listed = Callable[[], Awaitable[Sequence[str]]]


@dataclass
class _Followed:
    found: Found
    look: Look
    stamp: Stamp
    followers: int = 0
    told_at: float = -math.inf


@dataclass(frozen=True)
class ListState:
    """What a client was shown of the list."""

    stamp: Stamp
    uris: int
    """Hash of all addresses in their order."""

    @classmethod
    def of(cls, stamp: Stamp, uris: Sequence[str]) -> ListState:
        """``stamp`` must have been taken before the list was made, so that nothing is missed in between."""
        return cls(stamp, hash(tuple(uris)))


class Follower:
    """``follow`` and ``unfollow`` come in pairs, so do ``follow_list`` and ``unfollow_list``."""

    def __init__(
        self,
        context: Context,
        resources: Resources,
        bus: SubscriptionBus,
        listed: Listed,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._context = context
        self._resources = resources
        self._bus = bus
        self._listed = listed
        self._interval_s = interval_s
        self._followed: dict[str, _Followed] = {}
        self._list_followers = 0
        self._list: ListState | None = None
        self._close_at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def followed(self) -> int:
        """Addresses that are looked at."""
        return len(self._followed)

    @property
    def running(self) -> bool:
        return self._task is not None

    async def follow(self, uri: str, found: Found) -> bool:
        """Whether it can change. What it is like now is what a later look is compared with."""
        known = self._followed.get(uri)
        if known is None:
            made = await anyio.to_thread.run_sync(self._begin, found)
            if made is None:
                return False
            known = self._followed.setdefault(uri, made)
        known.followers += 1
        self._start()
        return True

    def unfollow(self, uri: str) -> None:
        known = self._followed[uri]
        known.followers -= 1
        if known.followers == 0:
            del self._followed[uri]
            self._stop_if_idle()

    async def list_state(self) -> ListState:
        stamp = await self.list_stamp()
        return ListState.of(stamp, await self._listed())

    async def list_stamp(self) -> Stamp:
        return await anyio.to_thread.run_sync(listing, self._context)

    def follow_list(self, shown: ListState) -> None:
        if self._list_followers == 0:
            self._list = shown
        self._list_followers += 1
        self._start()

    def unfollow_list(self) -> None:
        self._list_followers -= 1
        self._stop_if_idle()

    def _begin(self, found: Found) -> _Followed | None:
        look = self._resources.look_at(found)
        return None if look is None else _Followed(found, look, look())

    def _start(self) -> None:
        if self._task is None:  # in no context of the request that happened to come first
            self._task = asyncio.create_task(self._run(), name="follower", context=contextvars.Context())

    def _stop_if_idle(self) -> None:
        if self._task is not None and not self._followed and not self._list_followers:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        count = 0
        while True:
            await anyio.sleep(self._interval_s)
            count += 1
            try:
                await self._look()
                if self._list_followers and count % _LIST_LOOKS == 0:
                    await self._look_at_list()
            except Exception:  # a defect in one look must not end all subscriptions silently
                log.exception("a look at followed resources failed; the next one comes")

    async def _look(self) -> None:
        if not self._followed:
            return
        begin = time.monotonic()
        stamps = await anyio.to_thread.run_sync(self._stamps, dict(self._followed))
        for uri, stamp in stamps.items():
            known = self._followed.get(uri)
            if known is None or known.stamp == stamp or begin < known.told_at + known.found.kind.pause_s:
                continue
            known.stamp, known.told_at = stamp, begin
            await self._bus.publish(ResourceUpdated(uri=uri))

    def _stamps(self, followed: Mapping[str, _Followed]) -> dict[str, Stamp]:
        self._close_dead_runs(followed)
        return {uri: one.look() for uri, one in followed.items()}

    def _close_dead_runs(self, followed: Mapping[str, _Followed]) -> None:
        runs = {one.found.parameters.get("run_id", "") for one in followed.values()} - {""}
        self._close_at = {run_id: self._close_at.get(run_id, 0.0) for run_id in runs}
        for run_id, due in self._close_at.items():
            if due > time.monotonic():
                continue
            try:
                ended = self._context.runs.get(run_id).status.terminal
            except HermesRLError:  # not there yet, or unreadable now
                ended = False
            self._close_at[run_id] = math.inf if ended else time.monotonic() + _CLOSE_S

    async def _look_at_list(self) -> None:
        stamp = await self.list_stamp()
        if self._list is not None and self._list.stamp == stamp:
            return
        now = ListState.of(stamp, await self._listed())
        changed = self._list is None or self._list.uris != now.uris
        self._list = now
        if changed:
            await self._bus.publish(ResourcesListChanged())

"""One Chromium for one task, by Playwright, in a loop thread of its own.

Invariant: unless private addresses are allowed, no request of any page goes to this machine or its networks; after
``close`` no process and no file is left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Coroutine
from typing import Any, TypeVar

from hermes_rl_mcp.agent.loop_thread import LoopThread
from hermes_rl_mcp.agent.tools.guard_proxy import GuardProxy, Judge, public_only

_T = TypeVar("_T")
START_S = 60.0
ACTION_MS = 10_000
NAVIGATE_MS = 30_000
CALL_S = 60.0
CLOSE_S = 15.0
MAX_LINES = 200
_SCHEMES = ("http", "https", "data", "blob", "about")
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class BrowserSession:
    """Methods block. ``page`` belongs to the loop thread: use it inside ``run``."""

    def __init__(self, program: str, *, allow_private: bool, judge: Judge = public_only) -> None:
        self._program = program
        self._proxy = None if allow_private else GuardProxy(judge)
        self._thread = LoopThread("browser")
        self.console: list[dict[str, str]] = []
        self.dialogs: list[dict[str, Any]] = []
        """Open ones, the oldest first: ``{dialog_id, type, message, default_value, object}``."""
        self._dialogs_seen = 0
        self._playwright: Any = None
        self._browser: Any = None
        self.page: Any = None
        try:
            self._thread.run(self._start(), START_S)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float = CALL_S) -> _T:
        """Raises Playwright's errors and TimeoutError."""
        return self._thread.run(work, timeout_s)

    def close(self) -> None:
        try:
            self._thread.run(self._stop(), CLOSE_S)
        except (TimeoutError, RuntimeError):
            pass
        finally:
            self._thread.close()

    async def settled(self) -> None:
        """A click may begin to load a page: waits until there is one to look at."""
        from playwright.async_api import Error

        try:
            await self.page.wait_for_load_state("domcontentloaded", timeout=ACTION_MS)
        except Error:
            return  # a page that never ends to load can be looked at all the same

    async def _start(self) -> None:
        from playwright.async_api import async_playwright

        self._playwright = await async_playwright().start()
        guarded: dict[str, Any] = {}
        if self._proxy is not None:
            guarded["proxy"] = {
                "server": await self._proxy.start(),
                "bypass": "<-loopback>",
            }  # loopback through it, too
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium has no sandbox of its own for root
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._program or None,
            chromium_sandbox=not root,
            args=["--disable-dev-shm-usage", "--disable-gpu", "--webrtc-ip-handling-policy=disable_non_proxied_udp"],
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            **guarded,
        )
        context = await self._browser.new_context(accept_downloads=False, service_workers="block")
        context.set_default_timeout(ACTION_MS)
        await context.route("**/*", self._judge)
        context.on("page", self._adopt)
        await context.new_page()

    async def _stop(self) -> None:
        if self._browser is not None:
            await self._browser.close()
        if self._playwright is not None:
            await self._playwright.stop()
        if self._proxy is not None:
            await self._proxy.close()
        self._browser = self._playwright = None

    def _adopt(self, page: Any) -> None:
        """A page that opens is the one that is seen from then on."""
        self.page = page
        page.on("console", lambda message: self._say(message.type, message.text))
        page.on("pageerror", lambda error: self._say("exception", str(error)))
        page.on("dialog", self._hold)

    def _say(self, kind: str, line: str) -> None:
        self.console.append({"type": kind, "text": line[:2000]})
        del self.console[:-MAX_LINES]

    def _hold(self, dialog: Any) -> None:
        self._dialogs_seen += 1
        self.dialogs.append(
            {
                "dialog_id": f"d{self._dialogs_seen}",
                "type": dialog.type,
                "message": dialog.message[:2000],
                "default_value": dialog.default_value,
                "object": dialog,
            }
        )

    async def _judge(self, route: Any) -> None:
        """No files of this machine; addresses are the proxy's affair."""
        if str(route.request.url).partition(":")[0].lower() in _SCHEMES:
            await route.continue_()
        else:
            await route.abort("blockedbyclient")


def chromium_program(wanted: str) -> str:
    """A path, or empty for Playwright's own."""
    return wanted or next((found for name in _PROGRAMS if (found := shutil.which(name))), "")

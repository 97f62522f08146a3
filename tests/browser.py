"""Headless Chromium by the WebDriver protocol, for tests of pages. Skips where there is none."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from leash import leash, leashed, on_leash

_START_S, _WAIT_S = 200.0, 100.0
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def open(self, address: str) -> None:
        self._post("url", {"url": address})

    def run(self, script: str) -> Any:
        """What ``script`` returns."""
        return self._post("execute/sync", {"script": script, "args": []})

    def until(self, script: str) -> Any:
        """What ``script`` returns once that is true."""
        deadline = time.monotonic() + _WAIT_S
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """As a person does: it must be seen."""
        self._post(f"element/{self._element(selector)}/click", {})

    def text(self, selector: str) -> str:
        """What a person reads there, also where scripts are off."""
        return str(self._get(f"element/{self._element(selector)}/text"))

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size in CSS pixels, and the theme that the system asks for."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def picture(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """What was written to the console since the last look: refused scripts and styles, errors."""
        return [str(entry["message"]) for entry in self._post("se/log", {"type": "browser"})]

    def _element(self, selector: str) -> str:
        return str(next(iter(self._post("element", {"using": "css selector", "value": selector}).values())))

    def _get(self, path: str) -> Any:
        answer = self._client.get(f"/session/{self._session}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(f"/session/{self._session}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A fresh profile in ``folder``."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        pytest.skip("no chromium and chromedriver on this machine")
    log = (folder / "chromedriver.log").open("w+")
    process = subprocess.Popen(
        on_leash("browser", driver, "--port=0"),
        env=leashed({**os.environ, "PYTHONPATH": str(Path(__file__).parent)}),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(leash(),),
    )
    try:
        port = _until(lambda: _port(Path(log.name).read_text()))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_START_S, trust_env=False) as client:
            options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]}
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = client.post("/session", json={"capabilities": {"alwaysMatch": capabilities}})
            assert made.status_code == 200, made.text
            session = made.json()["value"]["sessionId"]
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}")
    finally:
        process.terminate()
        process.wait(timeout=60)
        log.close()


def _port(said: str) -> str:
    _, found, rest = said.partition("started successfully on port ")
    return rest.split(".")[0] if found else ""


def _until(holds: Callable[[], str]) -> str:
    deadline = time.monotonic() + _START_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def _drive(command: list[str]) -> int:
    """chromedriver ends its browsers when it is asked to end; it is when the test run is gone."""
    driver = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: driver.terminate())
    return driver.wait()


if __name__ == "__main__":
    sys.exit(_drive(sys.argv[1:]))

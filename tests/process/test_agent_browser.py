"""The browser tools with a real Chromium."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl_mcp.agent.tools.browser_session import BrowserSession, chromium_program
from hermes_rl_mcp.agent.tools.guard_proxy import public_only
from tests.tool_parts import Asked, Caller, page_server, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="needs the extra [browser]"),
    pytest.mark.skipif(shutil.which(chromium_program("") or "nothing") is None, reason="needs a Chromium"),
]
FORM = b"""<html><head><title>Form</title></head><body style="height:5000px"><h1>Hello</h1>
<label>Name <input id="n"></label><button onclick="document.getElementById('out').textContent =
'Hello ' + document.getElementById('n').value; console.log('clicked')">Greet</button>
<button onclick="document.title = 'said ' + prompt('What?', 'nothing')">Ask</button>
<p id="out"></p><a href="/second">Next</a><a href="/new" target="_blank">Another</a>
<img src="http://169.254.1.1/x.png" alt="far away"></body></html>"""
ANSWERS = {
    "/form": (200, "text/html", FORM),
    "/second": (200, "text/html", b"<title>Second</title><h1>The second page</h1>"),
    "/new": (200, "text/html", b"<title>New</title><h1>A new page</h1>"),
    "/long": (200, "text/html", b"<ul>" + b"".join(b"<li>row %d</li>" % n for n in range(2000)) + b"</ul>"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[Asked]]]:
    with page_server(ANSWERS) as found:
        yield found


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path, {"HERMES_RL_ALLOW_PRIVATE_URLS": "1"})
    yield caller
    caller.close()


def _ref(found: Any, what: str) -> str:
    line = next(line for line in found["snapshot"].splitlines() if what in line and "[ref=" in line)
    match = re.search(r"\[ref=(\w+)\]", line)
    assert match
    return match[1]


def test_a_page_is_seen_filled_in_clicked_and_left(call: Caller, server: tuple[str, list[Asked]]) -> None:
    url = server[0]
    page = call("browser_navigate", url=f"{url}/form")
    assert page["success"] and page["title"] == "Form" and page["status"] == 200
    call("browser_type", ref=_ref(page, "textbox"), text="Ada")
    clicked = call("browser_click", ref=f"@{_ref(page, 'Greet')}")
    assert "Hello Ada" in clicked["snapshot"]
    assert {"type": "log", "text": "clicked"} in call("browser_console", clear=True)["messages"]
    assert call("browser_console", expression="1 + 1")["result"] == "2"
    assert call("browser_console")["messages"] == []
    assert call("browser_scroll", direction="down")["scrolled_to"] == 600
    assert call("browser_press", key="Tab")["success"]
    images = call("browser_get_images")
    assert images["count"] == 1 and images["images"][0]["alt"] == "far away"
    second = call("browser_click", ref=_ref(call("browser_snapshot"), "Next"))
    assert "The second page" in second["snapshot"]
    assert call("browser_back")["title"] == "Form"
    assert (
        call("browser_cdp", method="Runtime.evaluate", params={"expression": "6*7"})["result"]["result"]["value"] == 42
    )
    call("browser_click", ref=_ref(call("browser_snapshot"), "Another"))
    wait_until(lambda: "A new page" in str(call("browser_snapshot")))


def test_a_dialog_waits_for_its_answer(call: Caller, server: tuple[str, list[Asked]]) -> None:
    page = call("browser_navigate", url=f"{server[0]}/form")
    assert call("browser_dialog", action="accept")["success"] is False
    call("browser_click", ref=_ref(page, "Ask"))
    seen = call("browser_snapshot")
    assert [(one["type"], one["message"]) for one in seen["dialogs"]] == [("prompt", "What?")]
    assert call("browser_dialog", action="accept", prompt_text="this")["success"]
    wait_until(lambda: call("browser_snapshot").get("title") == "said this")


def test_a_long_page_is_cut_and_can_be_had_whole(call: Caller, server: tuple[str, list[Asked]]) -> None:
    page = call("browser_navigate", url=f"{server[0]}/long")
    assert len(page["snapshot"]) < 8_200 and "browser_snapshot(full=true)" in page["snapshot"]
    assert "row 1999" in call("browser_snapshot", full=True)["snapshot"]


def test_what_goes_wrong_is_a_result(call: Caller, server: tuple[str, list[Asked]]) -> None:
    call("browser_navigate", url=f"{server[0]}/form")
    assert call("browser_click", ref="e9999")["success"] is False
    assert "error" in call("browser_press", key="NoSuchKey")
    assert "no http or https" in call("browser_navigate", url="file:///etc/passwd")["error"]


def test_no_page_reaches_this_machine_unless_the_operator_allows_it(
    tmp_path: Path, server: tuple[str, list[Asked]]
) -> None:
    url, asked = server
    guarded = Caller(tmp_path / "a")
    assert "refused" in guarded("browser_navigate", url=f"{url}/form")["error"]
    before = len(asked)
    fetched = "fetch('%s/second').then(r => r.text()).catch(e => 'blocked')" % url  # noqa: UP031 - braces of JavaScript
    assert guarded("browser_console", expression=fetched)["result"] == '"blocked"'
    assert len(asked) == before
    guarded.close()


SOCKET = """new Promise(done => { const one = new WebSocket('%s'); one.onopen = () => done('open');
one.onerror = () => done('refused'); })"""


def test_neither_a_redirect_nor_a_web_socket_nor_the_protocol_leads_past_the_guard(
    server: tuple[str, list[Asked]],
) -> None:
    inside, asked = server
    before = len(asked)
    answers = {
        "/page": (200, "text/html", b"<h1>outside</h1>"),
        "/moved": (302, "text/plain", f"{inside}/second".encode()),
    }
    with page_server(answers) as (outside, _):

        def judge(url: str) -> list[str]:  # as if this one server were somewhere else
            return ["127.0.0.1"] if url.startswith(outside) else public_only(url)

        session = BrowserSession(chromium_program(""), allow_private=False, judge=judge)

        async def content(path: str) -> str:
            await session.page.goto(outside + path)
            return str(await session.page.content())

        async def evaluated(expression: str) -> Any:
            return await session.page.evaluate(expression)

        async def file_opened() -> Any:
            channel = await session.page.context.new_cdp_session(session.page)
            return await channel.send("Page.navigate", {"url": "file:///etc/passwd"})

        try:
            assert "outside" in session.run(content("/page"))
            assert session.run(evaluated(SOCKET % inside.replace("http", "ws"))) == "refused"
            assert "such addresses are refused" in session.run(content("/moved"))
            assert "BLOCKED" in session.run(file_opened())["errorText"]
        finally:
            session.close()
    assert len(asked) == before


def test_after_the_task_no_browser_is_left(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    caller = Caller(tmp_path, {"HERMES_RL_ALLOW_PRIVATE_URLS": "1"})
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    caller("browser_navigate", url=f"{server[0]}/form")
    during = {one.pid for one in psutil.Process().children(recursive=True)} - before
    assert during
    caller.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in during))

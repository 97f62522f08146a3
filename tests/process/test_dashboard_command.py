"""``hermes-rl dashboard`` as a process, and its pages in a real browser."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from browser import browser
from dashboard_parts import COMPLETED, GOING, HOSTILE, completed, failed, going, step
from leash import leash, leashed, on_leash

from hermes_rl_mcp.paths import Home


@contextmanager
def dashboard(environ: dict[str, str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that it prints."""
    process = subprocess.Popen(
        on_leash("hermes_rl_mcp.cli.main", "dashboard", "--port", "0"),
        env=leashed(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=(leash(),),
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/dashboard\?token=\S+", process.stdout.readline())
        assert found is not None, process.communicate(timeout=10)
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_an_address_that_works_and_ends_with_code_0(
    environ: dict[str, str], how: signal.Signals
) -> None:
    completed(Home.from_environ(environ))
    with dashboard(environ) as (address, process):
        base = address.partition("/dashboard")[0]
        with httpx.Client(base_url=base, trust_env=False, timeout=30) as web:
            assert web.get("/dashboard").status_code == 401
            assert web.get("/").headers["location"] == "/dashboard"
            assert web.get(address).status_code == 200
            assert COMPLETED in web.get("/dashboard").text
            assert web.get("/dashboard", headers={"Host": "evil.example"}).status_code == 421
            assert web.get("/dashboard/static/live.js").headers["content-type"].startswith("text/javascript")
        process.send_signal(how)
        assert process.wait(timeout=100) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


PAGES = {"list": "/dashboard", "going": f"/dashboard/runs/{GOING}", "completed": f"/dashboard/runs/{COMPLETED}"}
WINDOWS = {
    "light": (1280, 900, False),
    "dark": (1280, 900, True),
    "phone": (390, 844, False),
    "phone-dark": (390, 844, True),
}


@pytest.mark.slow
def test_pages_fit_their_window_in_both_themes_and_break_no_rule_of_their_own(
    environ: dict[str, str], tmp_path: Path
) -> None:
    home = Home.from_environ(environ)
    completed(home)
    failed(home)
    with going(home, flags=True), dashboard(environ) as (address, _), browser(tmp_path) as window:
        base = address.partition("/dashboard")[0]
        window.open(address)
        window.until("return document.title.includes('Hermes RL') && !location.search.includes('token')")
        for look, (width, height, dark) in WINDOWS.items():
            window.window(width, height, dark=dark)
            for name, path in PAGES.items():
                window.open(base + path)
                window.picture(tmp_path / f"{name}-{look}.png")
                wide = window.run("return document.documentElement.scrollWidth")
                assert wide <= width, (name, look, wide)
                back = window.run("return getComputedStyle(document.body).backgroundColor")
                bright = sum(map(int, re.findall(r"\d+", back)[:3])) > 384
                assert bright is not dark
                small = window.run(
                    "return [...document.querySelectorAll('.plot text')].map(e => e.getBoundingClientRect().height)"
                )
                assert all(one >= 9.5 for one in small), (name, look, min(small))
        assert window.complaints() == []


@pytest.mark.slow
def test_a_page_follows_the_run_keeps_what_is_open_and_stops_it_by_two_clicks(
    environ: dict[str, str], tmp_path: Path
) -> None:
    home = Home.from_environ(environ)
    with going(home, steps=0), dashboard(environ) as (address, _), browser(tmp_path) as window:
        window.open(address)
        window.until("return !location.search.includes('token')")
        window.open(f"{address.partition('?')[0]}/runs/{GOING}?log=env&step=3")
        window.run("window.mine = 1")
        assert "Curves" not in window.text("#sections")
        step(home, 1)
        window.until("return document.getElementById('sections').textContent.includes('Curves')")
        window.run("document.getElementById('more-curves').open = true")
        step(home, 2)
        window.until("return document.getElementById('curves').textContent.includes('steps 1 to 2')")
        assert window.run("return window.mine") == 1  # without loading the page again
        assert window.run("return document.getElementById('more-curves').open")
        assert window.run("return document.title").startswith("2/60")
        window.click("#stop summary")
        window.click("#stop form button")
        window.until("return document.readyState === 'complete' && !location.pathname.endsWith('/stop')")
        assert home.run(GOING).stop_request.exists()
        assert window.complaints() == []


@pytest.mark.slow
def test_the_value_under_the_pointer_is_shown_and_pages_are_read_without_script(
    environ: dict[str, str], tmp_path: Path
) -> None:
    completed(Home.from_environ(environ))
    with dashboard(environ) as (address, _), browser(tmp_path) as window:
        window.open(address)
        window.until("return !location.search.includes('token')")
        run = f"{address.partition('?')[0]}/runs/{COMPLETED}"
        window.open(run)
        window.run(
            "const plot = document.querySelector('#chart-0 .plot'), box = plot.getBoundingClientRect();"
            "plot.dispatchEvent(new PointerEvent('pointermove', "
            "{bubbles: true, clientX: box.right - 4, clientY: box.top + 50}))"
        )
        assert window.run("return document.querySelector('#chart-0 .chart-now').textContent").startswith("step 60: 0.")
        window.devtools("Emulation.setScriptExecutionDisabled", {"value": True})
        window.open(run)
        assert window.text("#evaluation .verdict").startswith("improved by 0.46")


@pytest.mark.slow
def test_hostile_text_does_nothing_in_a_browser(environ: dict[str, str], tmp_path: Path) -> None:
    home = Home.from_environ(environ)
    with going(home, text=HOSTILE), dashboard(environ) as (address, _), browser(tmp_path) as window:
        window.open(address)
        window.until("return !location.search.includes('token')")
        window.open(f"{address.partition('?')[0]}/runs/{GOING}")
        window.picture(tmp_path / "hostile.png")
        assert window.run("return document.querySelectorAll('main script, main img').length") == 0
        assert "<script>alert(1)</script>" in window.run("return document.body.textContent")
        assert window.complaints() == []

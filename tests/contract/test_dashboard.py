"""The dashboard over HTTP: who sees it, what it shows, and that what it shows is text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import httpx
import pytest
from dashboard_parts import COMPLETED, FAILED, GOING, HOSTILE, completed, failed, going, step
from starlette.applications import Starlette

from hermes_rl_mcp.dashboard import routes
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.settings import Flags, load_settings
from hermes_rl_mcp.paths import Home
from hermes_rl_mcp.server.app import build_server
from hermes_rl_mcp.server.flags import Serving
from hermes_rl_mcp.server.serving_http import application

pytestmark = pytest.mark.anyio

TOKEN = "the-token-of-this-test-0123456789"
SITE = "http://127.0.0.1:8766"


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def site(
    environ: dict[str, str], token: str | None = TOKEN, *, clock: Clock | None = None, read_only: bool = False
) -> httpx.AsyncClient:
    context = Context(load_settings(environ, Flags(read_only=read_only)), clock or Clock())
    app = Starlette(routes=routes(context, token=token))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=SITE)


async def signed_in(web: httpx.AsyncClient) -> httpx.AsyncClient:
    assert (await web.get("/dashboard", params={"token": TOKEN})).status_code == 200
    return web


@pytest.fixture
def home(environ: dict[str, str]) -> Home:
    return Home.from_environ(environ)


class Markup(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


PAGES = ("/dashboard", f"/dashboard/runs/{COMPLETED}", f"/dashboard/runs/{COMPLETED}/logs/trainer")


async def test_without_the_token_nothing_is_shown(environ: dict[str, str], home: Home) -> None:
    completed(home)
    async with site(environ) as web:
        for path in PAGES:
            for params, headers in (
                ({}, {}),
                ({"token": TOKEN + "x"}, {}),
                ({"token": ""}, {}),
                ({}, {"Authorization": "Bearer x"}),
                ({}, {"Authorization": f"Basic {TOKEN}"}),
            ):
                answer = await web.get(path, params=params, headers=headers)
                assert answer.status_code == 401
                assert "arithmetic" not in answer.text
                assert "set-cookie" not in answer.headers
        assert (await web.post(f"/dashboard/runs/{COMPLETED}/stop")).status_code == 401
        assert (await web.post(f"/dashboard/runs/{COMPLETED}/stop?token={TOKEN}")).status_code == 401
        assert (await web.get(PAGES[0], headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200


async def test_the_printed_address_or_a_form_signs_in_and_the_cookie_does_not_hold_the_token(
    environ: dict[str, str], home: Home
) -> None:
    completed(home)
    clock = Clock()
    async with site(environ, clock=clock) as web:
        answer = await web.get(PAGES[1], params={"token": TOKEN})
        assert f'content="0;url={PAGES[1]}"' in answer.text
        assert TOKEN not in answer.text
        cookie = answer.headers["set-cookie"]
        assert TOKEN not in cookie
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/dashboard"))
        assert (await web.get(PAGES[1])).status_code == 200
        clock.now += 8 * 86_400
        assert (await web.get(PAGES[1])).status_code == 401
        web.cookies.clear()
        refused = await web.post("/dashboard/sign-in", data={"token": "wrong"})
        assert refused.status_code == 401
        assert "not the one" in refused.text
        assert (await web.post("/dashboard/sign-in", data={"token": TOKEN})).status_code == 303
        assert (await web.get(PAGES[1])).status_code == 200
        [(name, value)] = web.cookies.items()
        web.cookies.clear()
        expires, _, proof = value.partition(".")
        for forged in (f"{int(expires) + 1}.{proof}", f"{expires}.", ".", f"x.{proof}", f"{expires}.\xe9"):
            answer = await web.get(PAGES[1], headers={"Cookie": f"{name}={forged}".encode("latin-1")})
            assert answer.status_code == 401


async def test_without_a_token_only_this_machine_sees_it_and_nothing_can_be_stopped(
    environ: dict[str, str], home: Home
) -> None:
    with going(home):
        async with site(environ, None) as web:
            page = await web.get(f"/dashboard/runs/{GOING}")
            assert page.status_code == 200
            assert "Stop run" not in page.text
            assert "no token" in page.text
            assert (await web.post(f"/dashboard/runs/{GOING}/stop", data={"proof": ""})).status_code == 403
            assert (await web.get("/dashboard", headers={"Host": "evil.example"})).status_code == 403
        async with site(environ, read_only=True) as web:
            await signed_in(web)
            page = await web.get(f"/dashboard/runs/{GOING}")
            assert "Stop run" not in page.text
            assert "read-only" in page.text
            by_program = {"Authorization": f"Bearer {TOKEN}"}
            assert (await web.post(f"/dashboard/runs/{GOING}/stop", headers=by_program)).status_code == 403
        assert not home.run(GOING).stop_request.exists()


async def test_a_run_is_stopped_only_by_a_form_of_this_session_or_by_who_bears_the_token(
    environ: dict[str, str], home: Home
) -> None:
    with going(home):
        async with site(environ) as web:
            await signed_in(web)
            stop = f"/dashboard/runs/{GOING}/stop"
            page = (await web.get(f"/dashboard/runs/{GOING}")).text
            found = re.search(r'name="proof" value="([0-9a-f]{64})"', page)
            assert found is not None
            proof = {"proof": found[1]}
            for data, headers in (
                ({}, {}),
                ({"proof": "0" * 64}, {}),
                ({"proof": "é"}, {}),
                ({"proof": found[1], "more": "x" * 5000}, {}),
                (proof, {"Origin": "http://127.0.0.1:9999"}),
                (proof, {"Origin": "https://evil.example"}),
                (proof, {"Origin": "null"}),
                (proof, {"Sec-Fetch-Site": "cross-site"}),
                (proof, {"Sec-Fetch-Site": "same-site"}),
            ):
                answer = await web.post(stop, data=data, headers=headers)
                assert answer.status_code == 403, (data, headers)
            assert (await web.get(stop)).status_code == 405
            other = await site(environ).post(stop, data=proof)
            assert other.status_code == 401
            assert not home.run(GOING).stop_request.exists()
            answer = await web.post(stop, data=proof, headers={"Origin": SITE, "Sec-Fetch-Site": "same-origin"})
            assert answer.status_code == 303
            assert answer.headers["location"] == f"/dashboard/runs/{GOING}"
            assert json.loads(home.run(GOING).stop_request.read_text())["reason"] == "dashboard"


async def test_a_server_over_http_has_the_same_pages_behind_its_gate(environ: dict[str, str], home: Home) -> None:
    completed(home)
    serving = Serving("streamable-http", "127.0.0.1", 8766, TOKEN)
    app = application(build_server(Operations.from_environ(environ)), serving)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=SITE) as web:
        refused = await web.get("/dashboard")
        assert refused.status_code == 401
        assert "Sign in" in refused.text
        assert (await web.get("/dashboards")).text.startswith("This server wants 'Authorization: Bearer TOKEN'")
        assert (await web.get("/dashboard", headers={"Host": "evil.example"})).status_code == 421
        assert (await web.post("/dashboard/sign-in", headers={"Origin": "http://evil.example"})).status_code == 403
        assert (
            await web.post("/dashboard/sign-in", data={"token": TOKEN}, headers={"Origin": SITE})
        ).status_code == 303
        page = await web.get("/dashboard", headers={"Sec-Fetch-Site": "same-origin"})
        assert COMPLETED in page.text
        assert (await web.get("/mcp")).status_code == 401  # the cookie is for people's pages alone


async def test_what_models_environments_and_logs_wrote_is_text(environ: dict[str, str], home: Home) -> None:
    failed(home, HOSTILE)
    with going(home, text=HOSTILE):
        async with site(environ) as web:
            await signed_in(web)
            asked = {"text": HOSTILE, "status": HOSTILE, "log": HOSTILE, "step": HOSTILE, "offset": HOSTILE}
            run = f"/dashboard/runs/{GOING}"
            pages = [
                await web.get("/dashboard"),
                await web.get("/dashboard", params={"text": HOSTILE[:40]}),
                await web.get("/dashboard", params=asked),
                await web.get("/dashboard", params={"text": HOSTILE[-70:]}),
                await web.get(run),
                await web.get(run, params=asked),
                await web.get(f"{run}/logs/trainer"),
                await web.get("/dashboard/compare", params={"run": [GOING, FAILED]}),
                await web.get(f"{run}/logs/{HOSTILE[:20]}"),
                await web.get(f"/dashboard/runs/{FAILED}"),
                await web.get(f"/dashboard/runs/{HOSTILE[6:30].replace('/', '')}"),
                await site(environ).get("/dashboard", params={"token": HOSTILE}),
            ]
    shows = []
    for answer in pages:
        assert "\u202e" not in answer.text
        assert "\x1b" not in answer.text
        assert "\x00" not in answer.text
        markup = Markup(answer.text)
        shows.append("<script>alert(1)</script>" in markup.text)
        for tag, attributes in markup.tags:
            assert tag != "script" or str(attributes["src"]).startswith("/dashboard/static/live.js?"), answer.url
            assert tag != "img" or str(attributes["src"]).startswith("/dashboard/static/icon.svg?"), answer.url
            assert tag not in ("style", "iframe", "object", "base")
            assert not any(name.startswith("on") or name == "style" for name in attributes), attributes
            for name in ("href", "src", "action"):
                assert (attributes.get(name) or "/").startswith(("/dashboard", "#", "/")), attributes
    assert all(
        shows[index] for index in (0, 1, 4, 6, 7, 9)
    )  # lists, the run, its log, both side by side, the failed one


async def test_every_answer_is_confined(environ: dict[str, str], home: Home) -> None:
    completed(home)
    async with site(environ) as web:
        answers = [await web.get("/dashboard"), await web.get("/dashboard", params={"token": TOKEN})]
        paths = (*PAGES, "/dashboard/runs/00000000", "/dashboard/static/style.css?v", "/dashboard/static/none")
        answers += [await web.get(path) for path in paths]
        answers.append(await web.post(f"/dashboard/runs/{COMPLETED}/stop"))
        answers.append(await web.post("/dashboard/sign-in", data={"token": TOKEN}))
        tag = answers[2].headers["etag"]
        answers.append(await web.get(PAGES[0], headers={"If-None-Match": tag}))
    assert [answer.status_code for answer in answers] == [401, 200, 200, 200, 200, 404, 200, 404, 403, 303, 304]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        is_style = "style.css" in str(answer.url)
        assert ("immutable" if is_style else "no-store") in answer.headers["cache-control"]


async def test_secrets_are_masked_on_every_page(environ: dict[str, str], home: Home) -> None:
    key, nonce = "hush-hush-1234567890", "nonce-9876543210"
    with going(home, text=f"look: {key} {nonce}"):
        home.run(GOING).config.write_text(f"run:\n  nonce: {nonce}\n  path_prefix: {nonce}x\nenv:\n  note: {key}\n")
        async with site({**environ, "HF_TOKEN": key}) as web:
            await signed_in(web)
            for path in ("", f"/runs/{GOING}", f"/runs/{GOING}/logs/env", f"/runs/{GOING}?step=3&log=api"):
                page = await web.get(f"/dashboard{path}")
                assert page.status_code == 200
                assert "look: ***" in page.text
                assert key not in page.text
                assert path == "" or nonce not in page.text


async def test_the_list_is_filtered_and_comes_in_pages(environ: dict[str, str], home: Home) -> None:
    completed(home)
    failed(home)
    damaged = home.run("0badc0de")
    damaged.dir.mkdir(parents=True)
    damaged.record.write_text("{")

    def ids(page: str) -> set[str]:
        return set(re.findall(r'href="/dashboard/runs/([0-9a-f]{8})"', page))

    with going(home):
        async with site(environ) as web:
            await signed_in(web)
            page = (await web.get("/dashboard")).text
            assert ids(page) == {COMPLETED, FAILED, GOING, "0badc0de"}
            assert page.index(GOING) < page.index(COMPLETED) < page.index(FAILED)
            assert "34 / 60" in page
            for params, expected in (
                ({"status": "failed"}, {FAILED}),
                ({"status": "unreadable"}, {"0badc0de"}),
                ({"text": "GSM"}, {FAILED}),
                ({"text": COMPLETED[:5]}, {COMPLETED}),
                ({"text": "nothing has this"}, set()),
            ):
                assert ids((await web.get("/dashboard", params=params)).text) == expected
            shown = await web.get("/dashboard/runs/0badc0de")
            assert "run.json is damaged" in shown.text


async def test_a_run_shows_curves_rollouts_with_reward_and_version_events_and_the_verdict(
    environ: dict[str, str], home: Home
) -> None:
    completed(home)
    async with site(environ) as web:
        await signed_in(web)
        run = f"/dashboard/runs/{COMPLETED}"
        page = (await web.get(run)).text
        text = Markup(page).text
        for title in ("Reward", "Accuracy", "Answer length, tokens", "Loss", "Parts of the reward"):
            assert f">{title}</span>" in page
        assert "Reward, steps 1 to 60: mean reward from 0.344 to" in page
        assert "improved by 0.46, 95% interval 0.38 to 0.53" in text
        assert "base 37.0 %, adapter 83.0 %" in page
        assert "It is 6" in text
        assert "after the last step" in text
        assert "Rollouts of step 60" in text
        early = Markup((await web.get(run, params={"step": "5"})).text).text
        assert "Rollouts of step 5" in early
        assert "policy version 4" in early
        assert "reward 1.000" in early
        assert "advantage -0.450" in early
        none = await web.get(run, params={"step": "500"})
        assert "None were kept of step 500" in none.text
        assert 'href="/dashboard/runs/60aa11bb?step=60&amp;log=trainer#rollouts"' in none.text
        for params in ({"step": "-1"}, {"step": "1e3"}, {"step": "9" * 30}, {"step": "٣"}):
            assert (await web.get(run, params=params)).status_code == 400
        assert (await web.get(run, params={"log": "../../etc/passwd"})).status_code == 404
        assert (await web.get(f"{run}/logs/nolog")).status_code == 404
        assert (await web.get("/dashboard/runs/ffffffff")).status_code == 404


async def test_runs_side_by_side_show_curves_differences_and_verdicts(environ: dict[str, str], home: Home) -> None:
    completed(home)
    failed(home)
    async with site(environ) as web:
        await signed_in(web)
        both = {"run": [COMPLETED, FAILED]}
        page = (await web.get("/dashboard/compare", params=both)).text
        assert f"Reward, steps 1 to 60: {COMPLETED} from 0.344" in page
        assert f"; {FAILED} from 0.344" in page
        text = Markup(page).text
        assert "improved by 0.46" in text
        assert "gsm8k" in text
        assert "<code>environment</code>" in page
        for runs, status in (([COMPLETED], 400), ([COMPLETED, COMPLETED], 400), ([COMPLETED, "ffffffff"], 404)):
            assert (await web.get("/dashboard/compare", params={"run": runs})).status_code == status


async def test_a_page_shows_new_steps_and_costs_nothing_while_there_are_none(
    environ: dict[str, str], home: Home
) -> None:
    with going(home, steps=34, flags=True):
        async with site(environ) as web:
            await signed_in(web)
            run = f"/dashboard/runs/{GOING}"
            first = await web.get(run)
            assert "All truncated" in first.text
            assert "max_token_length" in first.text
            assert 'data-refresh-s="2.0"' in first.text
            same = await web.get(run, headers={"If-None-Match": first.headers["etag"]})
            assert same.status_code == 304
            assert same.text == ""
            step(home, 35)
            second = await web.get(run, headers={"If-None-Match": first.headers["etag"]})
            assert second.status_code == 200
            assert "steps 1 to 35" in second.text
            assert "steps 1 to 35" not in first.text


async def test_a_log_is_read_window_by_window(environ: dict[str, str], home: Home) -> None:
    completed(home)
    lines = "".join(f"line {number:06d}\n" for number in range(20_000))
    home.log("env", COMPLETED).write_text(lines)
    async with site(environ) as web:
        await signed_in(web)
        log = f"/dashboard/runs/{COMPLETED}/logs/env"
        page = (await web.get(log)).text
        assert "line 019999" in page
        assert "line 000000" not in page
        seen = set()
        path: str | None = f"{log}?offset=0"
        while path is not None:
            page = (await web.get(path)).text
            seen |= set(re.findall(r"line \d{6}\n", page))
            found = re.search(r'href="([^"]+)">Newer<', page)
            path = found[1] if found else None
        assert len(seen) >= 20_000 - 5  # those that a window's end cuts in two


async def test_a_home_without_runs_says_how_to_make_one(environ: dict[str, str]) -> None:
    async with site(environ) as web:
        await signed_in(web)
        assert "hermes-rl demo" in (await web.get("/dashboard")).text

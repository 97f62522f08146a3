"""Which HTTP requests reach a route: by Host, by Origin, by token."""

from __future__ import annotations

import pytest

from hermes_rl_mcp.server.gate import Gate, bears

TOKEN = "0123456789abcdef"
GATE = Gate(hosts={"gpu.example", "lab:8765"}, origins={"https://app.example", "http://app.example:3000"})
HOST = "127.0.0.1:8765"


def status(gate: Gate, path: str = "/mcp", address: str | None = "10.0.0.5", **headers: str) -> int | None:
    """None if the request goes through."""
    named = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    refusal = gate.refusal(named, path, address)
    return refusal.status if refusal else None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        HOST,
        "localhost:1",
        "LOCALHOST",
        "[::1]:8765",
        "gpu.example",
        "GPU.example:9",
        "lab:8765",
        "10.0.0.5:1",
    ],
)
def test_a_host_of_this_machine_of_this_connection_or_of_the_list_is_answered(host: str) -> None:
    assert status(GATE, host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil.example:8765",
            "10.0.0.6",
            "lab",
        ),
        *(
            "lab:8766",
            "127.0.0.1:8765, evil.example",
            "evil.example@127.0.0.1",
            "127.0.0.1:x",
            "127.0.0.1/x",
            "0.0.0.0",
        ),
        *("[::1", "127.0.0.1:99999", "127.0.0.1#evil.example", "127.0.0.1?evil"),
    ],
)
def test_sec_09_any_other_host_is_refused(host: str) -> None:
    assert status(GATE, host=host) == 421


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://127.0.0.1:8765",
            "http://localhost:6274",
            "http://[::1]:1",
            "https://app.example",
            "HTTPS://APP.example",
        ),
        *("http://app.example:3000", "https://localhost"),
    ],
)
def test_pages_of_this_machine_and_of_the_list_may_call(origin: str) -> None:
    assert status(GATE, origin=origin) is None


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "null",
            "",
            "http://evil.example",
            "http://127.0.0.1.evil.example",
            "http://app.example",
            "https://app.example:1",
        ),
        *(
            "http://localhost:6274, http://evil.example",
            "file://",
            "http://localhost@evil.example",
            "http://gpu.example",
        ),
        *("chrome-extension://localhost", "http://localhost/x", "//localhost"),
    ],
)
def test_sec_09_other_pages_may_not(origin: str) -> None:
    assert status(GATE, origin=origin) == 403


def test_a_page_of_this_server_may_call_it_under_each_name_it_answers_to() -> None:
    assert status(GATE, host="gpu.example:8765", origin="http://gpu.example:8765") is None
    assert status(GATE, host="gpu.example", origin="http://gpu.example:80") is None
    assert status(GATE, host="gpu.example:8765", origin="http://gpu.example:8766") == 403


def test_what_a_page_of_another_site_fetches_without_an_origin_is_refused_but_a_link_may_be_followed() -> None:
    assert status(GATE, sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == 403
    assert status(GATE, sec_fetch_site="cross-site") == 403
    assert status(GATE, sec_fetch_site="cross-site", sec_fetch_mode="navigate") is None
    assert status(GATE, sec_fetch_site="same-origin", sec_fetch_mode="cors") is None


@pytest.mark.parametrize("path", ["/mcp", "/sse", "/messages/", "/", "/dashboardx", "/nothing", "/mcp/../dashboard"])
def test_sec_09_no_path_is_reached_without_the_token(path: str) -> None:
    gate = Gate(token=TOKEN, own_token_check=("/dashboard",))
    assert status(gate, path) == 401
    assert status(gate, path, authorization=f"Bearer {TOKEN}") is None
    assert status(gate, path, authorization=f"bearer  {TOKEN}") is None


def test_pages_that_ask_for_the_token_themselves_are_let_through_to_do_so() -> None:
    gate = Gate(token=TOKEN, own_token_check=("/dashboard",))
    assert status(gate, "/dashboard") is None
    assert status(gate, "/dashboard/runs") is None
    assert status(gate, "/dashboard", host="evil.example") == 421
    assert status(gate, "/dashboard", origin="http://evil.example") == 403


@pytest.mark.parametrize(
    "value",
    [
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer é\udcff",
        f"Token {TOKEN}",
    ],
)
def test_a_header_that_is_not_this_bearer_token_is_none(value: str) -> None:
    assert not bears(value, TOKEN)
    assert bears(f"Bearer {TOKEN}", TOKEN)


def test_a_strangers_host_is_refused_before_the_token_is_looked_at_and_sentences_hold_no_control_characters() -> None:
    gate = Gate(token=TOKEN)
    assert status(gate, host="evil.example", authorization=f"Bearer {TOKEN}") == 421
    refusal = gate.refusal({"host": "evil\x1b[31m\n"}, "/mcp", None)
    assert refusal is not None
    assert refusal.sentence.isprintable()
    assert TOKEN not in repr(gate)

"""web_search, web_extract, vision_analyze and image_generate against servers that speak their wires."""

from __future__ import annotations

import base64
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl_mcp.agent.tools import fetching, search_backends
from hermes_rl_mcp.agent.tools.fetching import FetchError, checked_url, fetch
from hermes_rl_mcp.errors import EndpointError, InvalidValueError
from tests.tool_parts import Asked, Caller, page_server

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RESULTS = [{"url": "http://a.example/", "title": "A", "content": "about a", "description": "about a"}, {"no": "url"}]
ANSWERS = {
    "/search": (200, "application/json", json.dumps({"results": RESULTS}).encode()),
    "/res/v1/web/search": (200, "application/json", json.dumps({"web": {"results": RESULTS}}).encode()),
    "/page": (
        200,
        "text/html; charset=utf-8",
        "<html><head><title>Köln</title></head><body><nav>menu</nav><article><h1>Köln</h1><p>The city on the river "
        f"has a cathedral{', which took very long to build' * 12}.</p></article></body></html>".encode(),
    ),
    "/plain": (200, "text/plain", b"words"),
    "/moved": (302, "text/plain", b"/plain"),
    "/circle": (302, "text/plain", b"/circle"),
    "/inside": (302, "text/plain", b"http://169.254.1.1/secret"),
    "/large": (200, "text/plain", b"x" * 6_000_000),
    "/picture.png": (200, "image/png", PNG),
    "/v1/chat/completions": (200, "application/json", b'{"choices": [{"message": {"content": "a red dot"}}]}'),
    "/v1/images/generations": (
        200,
        "application/json",
        json.dumps({"data": [{"b64_json": base64.b64encode(PNG).decode()}]}).encode(),
    ),
    "/broken/search": (200, "text/html", b"<html>"),
    "/closed/search": (403, "text/html", b""),
}
PAGES = [
    {"url": "http://corpus.example/cats", "title": "Cats", "text": "Cats sleep for sixteen hours a day and hunt mice."},
    {"url": "http://corpus.example/dogs", "title": "Dogs", "text": "Dogs bark. A dog is no cat, and hunts in packs."},
    {"url": "http://corpus.example/fish", "title": "Fish", "text": "Fish swim."},
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[Asked]]]:
    with page_server(ANSWERS) as found:
        yield found


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f"{json.dumps(page)}\n" for page in PAGES))
    return str(path)


def _urls(found: Any) -> list[str]:
    assert found["success"]
    return [one["url"] for one in found["data"]["web"]]


def test_an_offline_corpus_is_searched_and_read_and_nothing_else_is(
    tmp_path: Path, corpus: str, server: tuple[str, list[Asked]]
) -> None:
    url, asked = server
    call = Caller(tmp_path, {"HERMES_RL_SEARCH_CORPUS": corpus, "HERMES_RL_ALLOW_PRIVATE_URLS": "1"})
    assert _urls(call("web_search", query="how long do cats sleep?")) == [PAGES[0]["url"], PAGES[1]["url"]]
    assert _urls(call("web_search", query='" OR NEAR( *')) == []
    assert _urls(call("web_search", query="swimming", limit=1)) == [PAGES[2]["url"]]
    before = len(asked)
    found = call("web_extract", urls=[PAGES[2]["url"], f"{url}/plain"])["results"]
    assert found[0] == {"url": PAGES[2]["url"], "title": "Fish", "content": "Fish swim.", "error": None}
    assert "no such page" in found[1]["error"] and len(asked) == before


def test_a_corpus_that_changes_is_read_again_and_a_damaged_one_names_the_line(tmp_path: Path, corpus: str) -> None:
    call = Caller(tmp_path, {"HERMES_RL_SEARCH_CORPUS": corpus})
    assert _urls(call("web_search", query="horses")) == []
    with open(corpus, "a") as file:
        file.write(json.dumps({"url": "http://corpus.example/horses", "title": "Horses", "text": "They run."}) + "\n")
    assert _urls(call("web_search", query="horses")) == ["http://corpus.example/horses"]
    with open(corpus, "a") as file:
        file.write('{"url": "x"}\n')
    with pytest.raises(InvalidValueError, match="line 5"):
        call("web_search", query="horses")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        Caller(tmp_path, {"HERMES_RL_SEARCH_CORPUS": "/none"})("web_search", query="x")


@pytest.mark.parametrize(
    ("settings", "shows"),
    [
        ({"SEARXNG_URL": "URL"}, "format=json"),
        ({"TAVILY_API_KEY": "tv", "TAVILY_URL": "URL"}, "Bearer tv"),
        ({"HERMES_RL_SECRET_TAVILY_API_KEY": "tv", "TAVILY_URL": "URL"}, "Bearer tv"),
        ({"BRAVE_API_KEY": "br", "BRAVE_URL": "URL"}, "'x-subscription-token': 'br'"),
    ],
    ids=["searxng", "tavily", "tavily-in-a-run", "brave"],
)
def test_each_search_service_is_asked_in_its_own_way(
    tmp_path: Path, server: tuple[str, list[Asked]], settings: dict[str, str], shows: str
) -> None:
    url, asked = server
    call = Caller(tmp_path, {name: value.replace("URL", url) for name, value in settings.items()})
    found = call("web_search", query="a & b", limit=3)
    assert found["data"]["web"] == [{"title": "A", "url": "http://a.example/", "description": "about a", "position": 1}]
    sent = asked[-1]
    assert shows in f"{sent.path} {sent.headers}"
    assert "a & b" in sent.body.decode() or "a+%26+b" in sent.path or "a%20%26%20b" in sent.path


def test_a_search_service_that_fails_is_said_to(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    url, _ = server
    for path, says in (("/broken", "no JSON object"), ("/closed", "403"), ("/nothing", "404")):
        with pytest.raises(EndpointError, match=says):
            Caller(tmp_path, {"SEARXNG_URL": url + path})("web_search", query="x")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(EndpointError, match="did not answer"):
            Caller(tmp_path, {"SEARXNG_URL": f"http://127.0.0.1:{closed.getsockname()[1]}"})("web_search", query="x")


def test_the_backend_is_what_the_operator_chose() -> None:
    both = {"SEARXNG_URL": "http://x", "HERMES_RL_SEARCH_CORPUS": "/c"}
    assert search_backends.backend(both) == "corpus"
    assert search_backends.backend({**both, "HERMES_RL_SEARCH_BACKEND": "searxng"}) == "searxng"
    assert "It can be" in (search_backends.missing({"HERMES_RL_SEARCH_BACKEND": "other"}) or "")
    assert "BRAVE_API_KEY is not set" in (search_backends.missing({"HERMES_RL_SEARCH_BACKEND": "brave"}) or "")
    assert search_backends.missing({}) and search_backends.backend({}) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost:8000/", "http://[::1]/", "http://10.1.2.3/", "http://192.168.0.1/",
        "http://169.254.169.254/latest", "http://[::ffff:127.0.0.1]/", "http://0.0.0.0/", "http://2130706433/",
        "http://[fe80::1]/", "http://100.64.0.1/", "http://224.0.0.1/", "http://0x7f.1/", "http://0177.0.0.1/",
        "http://127.1/", "http://[64:ff9b::7f00:1]/", "http://[::7f00:1]/", "http://[::ffff:0:7f00:1]/",
        "http://[2002:7f00:1::]/", "http://[fec0::1]/", "http://[64:ff9b:1::1]/", "http://192.0.0.8/",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_and_its_networks_are_refused(url: str) -> None:
    with pytest.raises(FetchError, match=r"private network|no host"):
        checked_url(url, allow_private=False)


def test_public_addresses_are_taken_also_behind_a_gateway() -> None:
    for url in ("http://1.1.1.1/", "http://[2606:4700::1111]/", "http://[64:ff9b::101:101]/", "http://16843009/"):
        assert len(checked_url(url, allow_private=False)) == 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://a/", "a.html", "http://", "http://u:p@127.0.0.1/", "http://[x"]
)
def test_what_is_no_plain_web_address_is_refused(url: str) -> None:
    with pytest.raises(FetchError):
        checked_url(url, allow_private=True)


def test_a_redirect_into_the_machine_is_refused_too(
    server: tuple[str, list[Asked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    judged = fetching._is_public
    monkeypatch.setattr(fetching, "_is_public", lambda address: address == "127.0.0.1" or judged(address))
    assert fetch(f"{url}/moved", allow_private=False).data == b"words"
    with pytest.raises(FetchError, match=r"169\.254\.1\.1 is an address"):
        fetch(f"{url}/inside", allow_private=False)


def test_a_name_is_connected_to_at_the_address_that_was_looked_at(
    server: tuple[str, list[Asked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = server
    port = int(url.rpartition(":")[2])
    answers = iter(["127.0.0.1", "169.254.1.1"])
    plain = socket.getaddrinfo

    def rebinding(host: Any, *args: Any, **more: Any) -> Any:
        return plain(next(answers), *args, **more) if host == "rebinds.example" else plain(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert fetch(f"http://rebinds.example:{port}/plain", allow_private=True).data == b"words"
    assert asked[-1].headers["host"] == f"rebinds.example:{port}"


def test_pages_are_bounded(server: tuple[str, list[Asked]]) -> None:
    url, _ = server
    for path, says in (("/large", "5 MB"), ("/circle", "redirects"), ("/none", "404")):
        with pytest.raises(FetchError, match=says):
            fetch(url + path, allow_private=True)


def test_pages_are_read_or_said_why_not(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    url, _ = server
    open_to_all = Caller(tmp_path, {"HERMES_RL_ALLOW_PRIVATE_URLS": "1"})
    found = open_to_all("web_extract", urls=[f"{url}/plain", f"{url}/picture.png"])["results"]
    assert found[0]["content"] == "words" and "image/png" in found[1]["error"]
    guarded = Caller(tmp_path)("web_extract", urls=f"{url}/plain")["results"]
    assert "refused" in guarded[0]["error"] and guarded[0]["content"] == ""
    with pytest.raises(InvalidValueError):
        open_to_all("web_extract", urls=["http://a"] * 6)


@pytest.mark.skipif(importlib.util.find_spec("trafilatura") is None, reason="needs the extra [agent]")
def test_the_text_of_a_page_is_found_in_its_markup(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    call = Caller(tmp_path, {"HERMES_RL_ALLOW_PRIVATE_URLS": "1"})
    found = call("web_extract", urls=[f"{server[0]}/page"])["results"][0]
    assert found["title"] == "Köln" and "has a cathedral" in found["content"] and "menu" not in found["content"]


def test_pictures_are_looked_at_from_files_addresses_and_data(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    url, asked = server
    settings = {
        "HERMES_RL_VISION_URL": f"{url}/v1",
        "HERMES_RL_VISION_MODEL": "sees",
        "HERMES_RL_VISION_API_KEY": "key-1",
        "HERMES_RL_ALLOW_PRIVATE_URLS": "1",
    }
    call = Caller(tmp_path, settings)
    call.sandbox.write_bytes("dot.png", PNG)
    data = "data:image/png;base64," + base64.b64encode(PNG).decode()
    for source in ("dot.png", f"{url}/picture.png", data):
        assert call("vision_analyze", image_url=source, question="What?") == {"success": True, "analysis": "a red dot"}
        sent = json.loads(asked[-1].body)
        assert sent["model"] == "sees" and sent["messages"][0]["content"][1]["image_url"]["url"] == data
        assert asked[-1].headers["authorization"] == "Bearer key-1"
    call.sandbox.write_bytes("text.png", b"words")
    for source in ("none.png", "text.png", "data:,%%", "http://u:p@x/"):
        with pytest.raises(InvalidValueError):
            call("vision_analyze", image_url=source, question="What?")
    wrong = Caller(tmp_path, {**settings, "HERMES_RL_VISION_URL": f"{url}/other"})
    with pytest.raises(EndpointError, match="404"):
        wrong("vision_analyze", image_url=data, question="What?")


def test_a_picture_is_made_and_put_into_the_sandbox(tmp_path: Path, server: tuple[str, list[Asked]]) -> None:
    url, asked = server
    call = Caller(tmp_path, {"HERMES_RL_IMAGE_URL": f"{url}/v1", "HERMES_RL_IMAGE_MODEL": "paints"})
    made = call("image_generate", prompt="a dot", aspect_ratio="portrait")
    assert call.sandbox.read_bytes(made["image"]) == PNG
    assert json.loads(asked[-1].body) == {"model": "paints", "prompt": "a dot", "n": 1, "size": "1024x1536"}

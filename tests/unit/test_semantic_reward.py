"""Nearness of meaning, by an endpoint that speaks OpenAI's /embeddings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from env_rig import http_server
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from hermes_rl_mcp.envs.rewards import Semantic
from hermes_rl_mcp.errors import EndpointError, MissingExtraError

VECTORS = {"cat": [1.0, 0.0], "kitten": [3.0, 4.0], "tax": [-1.0, 0.0]}


class Embedder:
    """Embeds the words it knows; answers ``reply`` as it stands if set."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: Any = None
        self.app = FastAPI()

        @self.app.post("/v1/embeddings")
        async def embeddings(request: Request) -> JSONResponse:
            body = await request.json()
            self.requests.append({**body, "key": request.headers.get("authorization")})
            if self.reply is not None:
                return JSONResponse(self.reply, 200 if isinstance(self.reply, dict) else 503)
            rows = [{"index": i, "embedding": VECTORS[text]} for i, text in enumerate(body["input"])]
            return JSONResponse({"data": rows[::-1]})


@pytest.fixture
def embedder() -> Iterator[tuple[Embedder, str]]:
    made = Embedder()
    with http_server(made.app) as url:
        yield made, f"{url}/v1"


@pytest.mark.anyio
async def test_the_value_is_the_cosine_of_the_endpoints_embeddings(embedder: tuple[Embedder, str]) -> None:
    server, url = embedder
    reward = Semantic(model="m", base_url=url, api_key="k")
    assert await reward("kitten", "cat") == pytest.approx(0.6)
    assert await reward("tax", "cat") == 0.0
    assert await reward("<think>tax</think> cat ", "cat") == 1.0
    assert server.requests[0] == {"model": "m", "input": ["kitten", "cat"], "key": "Bearer k"}
    assert len(server.requests) == 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        pytest.param("busy", "answered 503", id="refused"),
        pytest.param({"data": "none"}, "something else", id="no embeddings"),
        pytest.param({"data": [{"index": 0, "embedding": [1.0]}]}, "no two embeddings", id="one only"),
    ],
)
async def test_an_endpoint_that_gives_no_embeddings_is_named(
    embedder: tuple[Embedder, str], reply: Any, said: str
) -> None:
    server, url = embedder
    server.reply = reply
    with pytest.raises(EndpointError, match=said):
        await Semantic(base_url=url)("cat", "tax")


@pytest.mark.anyio
async def test_without_an_endpoint_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"hermes-rl-mcp\[rewards\]"):
        await Semantic()("cat", "tax")

"""Towards the rollout API a group is sent once or recognisably again, and a refusal is told from an outage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from env_rig import http_server

from hermes_rl_mcp.contracts.rollout_api import ScoredData
from hermes_rl_mcp.envs.groups import BadGroupError
from hermes_rl_mcp.envs.rollout_client import RolloutClient
from hermes_rl_mcp.errors import EndpointError

pytestmark = pytest.mark.anyio

GROUP = ScoredData(tokens=[[1] * 400, [2] * 400], masks=[[1] * 400, [2] * 400], scores=[0.0, 1.0], env_id=0)


class Stub:
    """Keeps the bodies it gets. ``script`` holds a status per request; 0 = the answer gets lost. Then 200."""

    def __init__(self) -> None:
        self.script: list[int] = []
        self.bodies: list[bytes] = []
        self.encodings: list[bytes | None] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.encodings.append(dict(scope["headers"]).get(b"content-encoding"))
        status = self.script.pop(0) if self.script else 200
        length = b"100" if status == 0 else b"2"
        headers = [(b"content-length", length), (b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status or 200, "headers": headers})
        if status:
            await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def stub() -> Iterator[tuple[Stub, str]]:
    app = Stub()
    with http_server(app) as url:
        yield app, url


async def test_a_lost_answer_or_a_full_api_gets_the_same_bytes_again(stub: tuple[Stub, str]) -> None:
    app, url = stub
    app.script = [0, 503]
    api = RolloutClient(url)
    await api.send(GROUP)
    await api.close()
    assert len(app.bodies) == 3
    assert len(set(app.bodies)) == 1
    assert app.encodings[0] == b"gzip"
    assert ScoredData.model_validate(json.loads(gzip.decompress(app.bodies[0]))) == GROUP


async def test_an_api_whose_queue_is_full_is_waited_for_as_long_as_it_says_so(stub: tuple[Stub, str]) -> None:
    app, url = stub
    app.script = [503, 503, 429, 503]
    api = RolloutClient(url, gone_s=0.0)
    await api.send(GROUP)
    await api.close()
    assert len(app.bodies) == 5 and len(set(app.bodies)) == 1


async def test_a_refused_group_is_dropped_with_the_reason(stub: tuple[Stub, str]) -> None:
    app, url = stub
    app.script = [422]
    api = RolloutClient(url)
    with pytest.raises(BadGroupError, match="422") as refused:
        await api.send(GROUP)
    await api.close()
    assert refused.value.reason == "refused"
    assert len(app.bodies) == 1


async def test_an_api_that_stays_away_is_given_up_in_time() -> None:
    api = RolloutClient("http://127.0.0.1:9", gone_s=0.0)
    with pytest.raises(EndpointError, match="did not take GET /info"):
        await api.info()
    await api.close()


async def test_a_server_that_is_no_rollout_api_is_recognised(stub: tuple[Stub, str]) -> None:
    api = RolloutClient(stub[1])
    with pytest.raises(EndpointError, match="not a rollout API"):
        await api.info()
    await api.close()


@pytest.mark.parametrize("content", [object(), "\ud800"], ids=["object", "half_a_pair"])
async def test_messages_that_no_wire_takes_are_the_groups_own_fault(stub: tuple[Stub, str], content: Any) -> None:
    app, url = stub
    client = RolloutClient(url)
    group = GROUP.model_copy(update={"messages": [[{"role": "user", "content": content}]] * 2})
    with pytest.raises(BadGroupError, match="cannot be written as JSON"):
        await client.send(group)
    await client.close()
    assert app.bodies == []

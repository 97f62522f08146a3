"""The trainer's rollout client against the real rollout API: no answer that gets lost loses a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from trainer_parts import until

from hermes_rl_mcp.contracts.rollout_api import Registration
from hermes_rl_mcp.errors import EndpointError
from hermes_rl_mcp.rollout_api.app import create_app
from hermes_rl_mcp.rollout_api.limits import Limits
from hermes_rl_mcp.rollout_api.rollouts import Rollouts
from trainer.http_server import HttpServer, listener
from trainer.rollout_client import RolloutClient

REGISTRATION = Registration(
    wandb_group="g",
    wandb_project="p",
    batch_size=2,
    max_token_len=100,
    checkpoint_dir="",
    save_checkpoint_interval=0,
    starting_step=0,
    num_steps=10,
)


class Losing(httpx.BaseTransport):
    """Delivers every request and loses the answers that ``lost`` names, once each."""

    def __init__(self, lost: list[str]) -> None:
        self._inner = httpx.HTTPTransport()
        self.lost = lost

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        name = request.url.path.rsplit("/", 1)[-1]
        if name in self.lost:
            response.read()
            self.lost.remove(name)
            raise httpx.ReadTimeout("the answer was lost", request=request)
        return response

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def api_url() -> Iterator[str]:
    server = _start(0)
    yield f"http://127.0.0.1:{server.port}/secret"
    server.stop()


def _start(port: int) -> HttpServer:
    app = create_app(Rollouts(Limits()), nonce="n", path_prefix="secret")
    return HttpServer(app, listener("127.0.0.1", port, None))


Client = Callable[..., RolloutClient]


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def connect(api_url: str, stopping: threading.Event) -> Iterator[Client]:
    opened: list[httpx.Client] = []

    def connect(lost: list[str] | None = None, **options: Any) -> RolloutClient:
        http = httpx.Client(transport=Losing(lost or []), trust_env=False)
        opened.append(http)
        return RolloutClient(options.pop("url", api_url), http, stopping, **options)

    yield connect
    for http in opened:
        http.close()


def _post_group(api_url: str, mark: int) -> None:
    group = {
        "tokens": [[1, 2, mark]] * 2,
        "masks": [[-100, -100, mark]] * 2,
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -1.0]] * 2,
    }
    assert httpx.post(f"{api_url}/scored_data", json=group, trust_env=False).status_code == 200


def _status(api_url: str) -> dict[str, int]:
    return dict(httpx.get(f"{api_url}/status", trust_env=False).json())


def _mark(client: RolloutClient) -> int:
    lease = client.next_batch()
    assert lease is not None and lease.lease_id is not None
    client.acknowledge(lease)
    return lease.groups[0].tokens[0][-1]


def test_batches_come_in_order_and_count_once_acknowledged(api_url: str, connect: Client) -> None:
    client = connect()
    client.register(REGISTRATION)
    for mark in (7, 8, 9):
        _post_group(api_url, mark)
    assert [_mark(client) for _ in range(3)] == [7, 8, 9]
    assert _status(api_url) == {"current_step": 3, "queue_size": 0}


def test_a_batch_whose_answer_was_lost_comes_again(api_url: str, connect: Client) -> None:
    client = connect(["batch"])
    client.register(REGISTRATION)
    for mark in (7, 8):
        _post_group(api_url, mark)
    assert [_mark(client), _mark(client)] == [7, 8]
    assert _status(api_url) == {"current_step": 2, "queue_size": 0}


def test_a_lost_answer_to_an_acknowledgement_does_not_bring_the_batch_back(api_url: str, connect: Client) -> None:
    client = connect(["acknowledge", "register"])
    client.register(REGISTRATION)
    for mark in (7, 8):
        _post_group(api_url, mark)
    assert [_mark(client), _mark(client)] == [7, 8]
    assert _status(api_url) == {"current_step": 2, "queue_size": 0}


def test_an_unacknowledged_batch_goes_to_the_next_trainer(api_url: str, connect: Client) -> None:
    first = connect()
    first.register(REGISTRATION)
    _post_group(api_url, 7)
    assert first.next_batch() is not None
    second = connect()
    second.register(REGISTRATION)
    assert _mark(second) == 7


def test_registration_waits_for_an_api_that_is_not_up_yet(connect: Client, stopping: threading.Event) -> None:
    socket = listener("127.0.0.1", 0, None)
    port = socket.getsockname()[1]
    client = connect(url=f"http://127.0.0.1:{port}/secret")
    thread = threading.Thread(target=client.register, args=(REGISTRATION,))
    thread.start()
    app = create_app(Rollouts(Limits()), nonce="n", path_prefix="secret")
    server = HttpServer(app, socket)
    try:
        until(lambda: not thread.is_alive())
        info = httpx.get(f"http://127.0.0.1:{port}/secret/info", trust_env=False).json()
        assert info == {"batch_size": 2, "max_token_len": 100}
    finally:
        server.stop()


def test_a_forgotten_registration_is_made_again(api_url: str, connect: Client) -> None:
    client = connect()
    client.register(REGISTRATION)
    httpx.get(f"{api_url}/reset_data", trust_env=False)
    _post_group(api_url, 7)
    assert _mark(client) == 7


def test_an_api_that_stays_away_ends_in_an_error_that_says_so(connect: Client) -> None:
    client = connect(url="http://127.0.0.1:9/secret", patience_s=0.2)
    with pytest.raises(EndpointError, match="has not answered"):
        client.register(REGISTRATION)


def test_a_refusal_is_final_and_quoted(connect: Client) -> None:
    with pytest.raises(EndpointError, match="batch_size"):
        connect().register(REGISTRATION.model_copy(update={"batch_size": 0}))


def test_stopping_ends_the_wait_for_a_batch(connect: Client, stopping: threading.Event) -> None:
    polled = threading.Event()
    client = connect(on_answer=polled.set)
    client.register(REGISTRATION)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(client.next_batch()))
    thread.start()
    assert polled.wait(30)
    stopping.set()
    until(lambda: not thread.is_alive())
    assert found == [None]


def test_a_batch_trained_while_asked_to_stop_is_still_acknowledged(
    api_url: str, connect: Client, stopping: threading.Event
) -> None:
    client = connect()
    client.register(REGISTRATION)
    _post_group(api_url, 7)
    lease = client.next_batch()
    assert lease is not None
    stopping.set()
    client.acknowledge(lease)
    assert _status(api_url) == {"current_step": 1, "queue_size": 0}

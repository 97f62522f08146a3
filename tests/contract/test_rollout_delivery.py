"""A batch reaches the trainer exactly once: leases, clients that vanish, many at a time, the end of the server."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from rollout_rig import RolloutServer, group, running, tag_of

LARGE = 16_000
"""Tokens per sequence that make a batch of 8 several times what two sockets buffer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutServer]:
    with running(tmp_path_factory.mktemp("api")) as server:
        yield server


@pytest.fixture
def api(server: RolloutServer) -> RolloutServer:
    server.client.get("/reset_data")
    return server


def request_batch(connection: socket.socket) -> None:
    connection.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")


def reset_connection(connection: socket.socket) -> None:
    """What the kernel does for a process that dies with unread data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def ask_and_give_up(api: RolloutServer, *headers: str) -> None:
    """A client whose patience ends before a busy server looks at its request: both are there when it does."""
    assert api.process
    before = undelivered(api)
    server = psutil.Process(api.process.pid)
    server.suspend()
    try:
        while server.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        connection = api.raw()
        connection.sendall("\r\n".join(["GET /batch HTTP/1.1", "Host: localhost", *headers, "", ""]).encode())
        connection.close()
    finally:
        server.resume()
    wait_until(lambda: undelivered(api) > before)


def undelivered(api: RolloutServer) -> int:
    return api.log.read_text().count("could not be delivered")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post_large(api: RolloutServer, tags: range, length: int = LARGE) -> None:
    for tag in tags:
        api.post(group(tag, length=length, ref_logprobs=[[-1.0 / 3] * length] * 4))


# Leases


def test_a_leased_batch_counts_as_a_step_when_it_is_acknowledged(api: RolloutServer) -> None:
    api.register()
    for tag in range(4):
        api.post(group(tag))
    first, second = api.batch(lease=True), api.batch(lease=True)
    assert [tag_of(item) for item in first["batch"]] == [0, 1]
    assert [tag_of(item) for item in second["batch"]] == [2, 3]
    assert api.step() == 0
    for _ in range(2):  # a repeated acknowledgement is answered alike and counts once
        reply = api.client.post("/acknowledge", json={"lease_id": first["lease_id"]})
        assert (reply.status_code, reply.json()) == (200, {"status": "success"})
    assert api.step() == 1
    assert api.batch(lease=True) == {"batch": None, "lease_id": None}


def test_unacknowledged_batches_come_again_in_order_when_the_trainer_registers_again(api: RolloutServer) -> None:
    api.register()
    for tag in range(8):
        api.post(group(tag))
    trained = api.batch(lease=True)["lease_id"]
    api.client.post("/acknowledge", json={"lease_id": trained})
    lost = [api.batch(lease=True)["lease_id"] for _ in range(2)]
    api.register()
    assert [api.tags(lease=True) for _ in range(4)] == [[2, 3], [4, 5], [6, 7], None]
    assert api.step() == 1
    for lease in lost:
        assert api.client.post("/acknowledge", json={"lease_id": lease}).status_code == 404
    assert api.client.post("/acknowledge", json={"lease_id": trained}).status_code == 200


def test_a_lease_needs_a_registered_trainer(api: RolloutServer) -> None:
    api.post(group(1))
    reply = api.client.get("/batch", params={"lease": 1})
    assert reply.status_code == 409 and reply.json()["message"].startswith("Trainer not registered")


def test_a_reset_ends_all_leases(api: RolloutServer) -> None:
    api.register(batch_size=4)
    api.post(group(1))
    lease = api.batch(lease=True)["lease_id"]
    api.client.post("/reset_data")
    assert api.client.post("/acknowledge", json={"lease_id": lease}).status_code == 404
    api.register(batch_size=4)
    assert api.tags(lease=True) is None


# Clients that vanish


@pytest.mark.parametrize("lease", [False, True])
def test_a_batch_whose_client_vanishes_while_it_is_written_is_the_next_one_again(
    api: RolloutServer, lease: bool
) -> None:
    api.register()
    post_large(api, range(4))
    connection = api.raw()
    target = b"/batch?lease=1" if lease else b"/batch"
    connection.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
    assert len(connection.recv(1000)) > 0
    assert api.client.get("/status").json()["queue_size"] == 2
    reset_connection(connection)
    wait_until(lambda: api.client.get("/status").json()["queue_size"] == 4)
    assert api.step() == 0
    assert api.tags() == [0, 1]
    assert api.tags() == [2, 3]
    assert api.step() == 2


def test_a_batch_whose_client_gave_up_before_it_was_written_is_the_next_one_again(api: RolloutServer) -> None:
    api.register()
    api.post(group(1))
    api.post(group(2))
    for _ in range(10):
        ask_and_give_up(api)
    assert api.tags() == [1, 2]


def test_a_client_that_times_out_during_compression_loses_nothing(api: RolloutServer) -> None:
    api.register()
    post_large(api, range(2))
    ask_and_give_up(api, "Accept-Encoding: gzip")
    assert api.tags() == [0, 1]


def test_a_client_that_reads_everything_and_closes_at_once_got_its_batch(api: RolloutServer) -> None:
    api.register(batch_size=4)
    for tag in range(40):
        api.post(group(tag, length=3 if tag % 2 else 3000))
    got = []
    for _ in range(40):
        connection = http.client.HTTPConnection("127.0.0.1", api.port)
        connection.request("GET", "/batch")
        got += json.loads(connection.getresponse().read())["batch"]
        connection.close()
    assert [tag_of(item) for item in got] == list(range(40))
    assert api.tags() is None and api.step() == 40


def test_a_slow_reader_gets_its_batch_while_others_are_served(api: RolloutServer) -> None:
    api.register()
    post_large(api, range(2))
    with api.raw() as connection:
        request_batch(connection)
        received = bytearray(connection.recv(1000))
        for _ in range(20):  # others are served while this one reads nothing
            assert api.client.get("/status").status_code == 200
        assert api.tags() is None
        while not received.endswith(b"]}"):
            received += connection.recv(1 << 20)
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert [tag_of(item) for item in json.loads(body)["batch"]] == [0, 1]
    assert api.tags() is None and api.step() == 1


# Many at a time


def test_nothing_is_lost_or_doubled_with_many_clients_at_once(api: RolloutServer) -> None:
    api.register()
    groups_each, clients = 20, 6
    done = threading.Event()

    def post(client: int) -> None:
        with httpx.Client(base_url=str(api.client.base_url), timeout=30) as web:
            for index in range(groups_each):
                body = group(client * 1000 + index, length=60)
                assert web.post("/scored_data", json=body).json() == {"status": "received"}

    def take(lease: bool) -> list[int]:
        found: list[int] = []
        with httpx.Client(base_url=str(api.client.base_url), timeout=30) as web:
            while True:
                last_look = done.is_set()
                reply = web.get("/batch", params={"lease": 1} if lease else {}).json()
                if reply["batch"] is not None:
                    found += [tag_of(item) for item in reply["batch"]]
                    if lease:
                        assert web.post("/acknowledge", json={"lease_id": reply["lease_id"]}).status_code == 200
                elif last_look:
                    return found

    with ThreadPoolExecutor(clients + 2) as pool:
        taking = [pool.submit(take, lease) for lease in (False, True)]
        for posting in [pool.submit(post, client) for client in range(clients)]:
            posting.result()
        done.set()
        found = Counter(tag for taken in taking for tag in taken.result())
    assert found == Counter(client * 1000 + index for client in range(clients) for index in range(groups_each))
    assert api.step() == groups_each * clients // 2


def test_groups_of_one_client_keep_their_order(api: RolloutServer) -> None:
    api.register(batch_size=4)
    for tag in range(12):
        api.post(group(tag, length=2000 if tag % 3 == 0 else 3))
    assert [api.tags() for _ in range(12)] == [[tag] for tag in range(12)]


# The end of the server


ENDS_S = 2.0


def test_the_server_ends_within_two_seconds_with_clients_connected(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    took_s: list[float] = []
    with running(tmp_path, "--journal", str(journal)) as server:
        server.register()
        post_large(server, range(2))
        while not took_s or (took_s[-1] >= ENDS_S and len(took_s) < 3):  # a busy machine may hold one back
            took_s.append(end_with_clients(server))
            server.start()
        assert server.tags() == [0, 1]  # the one that was being written
    assert min(took_s) < ENDS_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), took_s


def end_with_clients(server: RolloutServer) -> float:
    """Seconds that it takes; one client idles, one is in the middle of a request, one does not read its answer."""
    with server.raw() as idle, server.raw() as half, server.raw() as stuck:
        idle.sendall(b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1000)
        half.sendall(b"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        request_batch(stuck)
        assert stuck.recv(1000)
        began = time.monotonic()
        assert server.end() == 0
        return time.monotonic() - began

"""Claims on devices and ports: first come, first served, and nothing outlives its holder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.runs import locks
from hermes_rl_mcp.runs.claims import bind_loopback, holder, take_ticket


def test_tickets_are_served_in_order_and_a_released_one_does_not_count(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    first, second, third = (take_ticket(claims, "cpu", f"0000000{n}") for n in (1, 2, 3))
    assert first.ahead() == [] and holder(claims, "cpu") == "00000001"
    assert third.ahead() == ["00000001", "00000002"]
    second.release()
    assert third.ahead() == ["00000001"]
    late = take_ticket(claims, "cpu", "00000004")
    first.release()
    assert third.ahead() == [] and late.ahead() == ["00000003"]
    for ticket in (third, late):
        ticket.release()
    assert holder(claims, "cpu") is None


def test_devices_have_queues_of_their_own(tmp_path: Path) -> None:
    cpu, cuda = take_ticket(tmp_path / "c", "cpu", "0000000a"), take_ticket(tmp_path / "c", "cuda", "0000000b")
    assert cpu.ahead() == [] and cuda.ahead() == []
    cpu.release()
    cuda.release()


def test_a_ticket_is_held_until_the_child_that_inherited_it_is_gone(tmp_path: Path) -> None:
    ticket = take_ticket(tmp_path / "c", "cuda", "0000000a")
    reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    child = subprocess.Popen(reads, stdin=subprocess.PIPE, pass_fds=[ticket.lock.fd])
    ticket.release()
    assert holder(tmp_path / "c", "cuda") == "0000000a"
    child.communicate()
    assert holder(tmp_path / "c", "cuda") is None


def test_a_claims_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "claims"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PreflightError, match="not private"):
        take_ticket(shared, "cpu", "0000000a")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PreflightError, match="not private"):
        take_ticket(tmp_path / "link", "cpu", "0000000a")


def test_bound_ports_differ_are_loopback_and_do_not_answer_yet() -> None:
    first = bind_loopback(18_431)
    second = bind_loopback(first.getsockname()[1])
    try:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] == first.getsockname()[1] + 2
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first.getsockname(), timeout=1)
        thief = socket.socket()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"), thief:
            thief.bind(first.getsockname())
    finally:
        first.close()
        second.close()


def test_a_lock_passes_to_a_child_by_descriptor_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = locks.take(path)
    assert lock is not None and locks.take(path) is None and locks.is_held(path)
    program = (
        "import sys; from pathlib import Path; from hermes_rl_mcp.runs import locks;"
        "locks.adopt(Path(sys.argv[1]), int(sys.argv[2])); print('mine', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(lock.fd)],
        pass_fds=[lock.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    lock.release()
    assert child.stdout is not None and child.stdout.readline() == b"mine\n"
    assert locks.is_held(path)
    child.communicate()
    assert not locks.is_held(path)


def test_only_a_locked_descriptor_of_that_file_can_be_adopted(tmp_path: Path) -> None:
    path, other = tmp_path / "lock", tmp_path / "other"
    lock = locks.take(path)
    assert lock is not None
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ValueError, match="holds no lock"):
        locks.adopt(path, fd)
    other.touch()
    with pytest.raises(ValueError, match="holds no lock"):
        locks.adopt(other, lock.fd)
    os.close(fd)
    lock.release()
    with pytest.raises(ValueError, match="not open"):
        locks.adopt(path, 9999)

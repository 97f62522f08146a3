"""Signals reach exactly the process they are meant for, or nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hermes_rl_mcp.contracts.runs import Identity
from hermes_rl_mcp.runs import process
from hermes_rl_mcp.runs.process import (
    MARKER,
    ManagedProcess,
    ProcessSpec,
    boot_id,
    end_all,
    identity_of,
    is_alive,
    marked,
    may_signal,
    signal_group,
    signal_process,
)

SLEEP = "import time; time.sleep(300)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def identity(process: subprocess.Popen[bytes]) -> Identity:
    found = identity_of(process.pid)
    assert found is not None
    return found


@pytest.mark.parametrize("change", [{"started_at": 1.0}, {"boot_id": "another"}])
def test_a_mismatch_is_not_alive_and_gets_no_signal(
    sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    forged = identity(sleeper).model_copy(update=change)
    assert not is_alive(forged)
    assert not signal_group(forged, signal.SIGKILL) and not signal_process(forged, signal.SIGKILL)
    assert end_all([forged], term_s=0, kill_s=0) == []
    assert sleeper.poll() is None


def test_a_match_is_alive_and_gets_the_signal(sleeper: subprocess.Popen[bytes]) -> None:
    real = identity(sleeper)
    assert is_alive(real) and signal_group(real, signal.SIGTERM)
    assert sleeper.wait(5) == -signal.SIGTERM
    assert not is_alive(real) and not signal_process(real, signal.SIGTERM)


@pytest.mark.parametrize(
    "pid", [-1, 0, 1, os.getpid(), os.getpgrp()], ids=["everybody", "our group", "init", "we", "our leader"]
)
def test_sec_26_nobody_init_and_ourselves_are_never_signalled(pid: int) -> None:
    named = identity_of(pid) or Identity(pid=pid, started_at=0.0, boot_id=boot_id())
    assert not may_signal(named)
    # SIGURG does no harm if this should ever fail.
    assert not signal_process(named, signal.Signals.SIGURG) and not signal_group(named, signal.Signals.SIGURG)


def test_a_zombie_is_not_alive_but_keeps_its_identity() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    real = identity(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(real) and identity_of(process.pid) == real
    process.wait()
    assert identity_of(process.pid) is None


def test_marked_finds_a_process_by_the_variable_it_inherited() -> None:
    value = f"test.{os.getpid()}.{time.monotonic_ns()}"
    process = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, MARKER: value}, start_new_session=True)
    try:
        assert [one.pid for one in marked(value)] == [process.pid]
        assert marked(value + "x") == []
        assert end_all(marked(value), term_s=5, kill_s=5) == []
    finally:
        process.kill()
        process.wait()


def spec(folder: Path, program: str) -> ProcessSpec:
    return ProcessSpec(
        name="env",
        argv=(sys.executable, "-c", program),
        environ={"ONLY": "this", "HERMES_RL_TEST_MARK": os.environ["HERMES_RL_TEST_MARK"]},
        log=folder / "child.log",
        cwd=folder,
    )


@pytest.mark.anyio
async def test_a_child_leads_its_own_session_reads_nothing_and_logs_to_its_file(tmp_path: Path) -> None:
    program = (
        "import os, sys; print(os.getsid(0) == os.getpid() == os.getpgrp(), sys.stdin.read() == '');"
        "print(os.environ['ONLY'], 'PATH' in os.environ, file=sys.stderr); sys.exit(3)"
    )
    (tmp_path / "child.log").write_text("before\n")
    child = ManagedProcess.spawn(spec(tmp_path, program))
    assert await child.wait(10) == 3
    assert child.poll() == 3, "asking again tells the same"
    assert await child.stop(term_s=1, kill_s=1) and not child.forced
    child.reap()
    lines = (tmp_path / "child.log").read_text().splitlines()
    assert lines[0] == "before" and set(lines[1:]) == {"True True", "this False"}


def live_members(group: int) -> list[int]:
    """Of a process group, without its leader."""
    found = []
    for pid in psutil.pids():
        try:
            member = os.getpgid(pid) == group and pid != group
        except ProcessLookupError:
            continue
        if member and (named := identity_of(pid)) and is_alive(named):
            found.append(pid)
    return found


@pytest.mark.anyio
async def test_stop_ends_a_group_whose_leader_is_gone_already(tmp_path: Path) -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{SLEEP}'])"
    child = ManagedProcess.spawn(spec(tmp_path, program))
    assert await child.wait(10) == 0
    assert child.exit_code == 0
    assert await child.stop(term_s=5, kill_s=5)
    assert not child.forced, "the leader went by itself"
    child.reap()
    assert live_members(child.identity.pid) == []


@pytest.mark.anyio
async def test_stop_kills_what_ignores_sigterm_within_its_bounds(tmp_path: Path) -> None:
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
    child = ManagedProcess.spawn(spec(tmp_path, program))
    deadline = time.monotonic() + 10
    while "deaf" not in child.spec.log.read_text() and time.monotonic() < deadline:
        await child.wait(0.02)
    assert await child.stop(term_s=0.2, kill_s=5)
    assert child.exit_code == -signal.SIGKILL and child.forced
    child.reap()


def test_a_pid_that_passes_to_a_stranger_between_check_and_signal_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is told to hand out the number again at the worst moment."""
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    ours = subprocess.Popen(["sleep", "60"])
    identity = identity_of(ours.pid)
    assert identity is not None
    strangers: list[subprocess.Popen[bytes]] = []

    def checked_and_then_reused(one: Identity) -> bool:
        assert identity_of(one.pid) == one
        ours.kill()
        ours.wait()
        try:
            last_pid.write_text(str(one.pid - 1))
        except OSError:
            pytest.skip("only root may choose the next pid")
        strangers.append(subprocess.Popen(["sleep", "60"]))
        return True

    monkeypatch.setattr(process, "may_signal", checked_and_then_reused)
    try:
        sent = signal_process(identity, signal.SIGTERM)
        if strangers[0].pid != identity.pid:
            pytest.skip("another process of this machine got the number first")
        assert not sent
        assert strangers[0].poll() is None
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()
        ours.kill()
        ours.wait()

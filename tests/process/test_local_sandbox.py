"""A local sandbox: what runs in it, what it is told, and that nothing of it is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from hermes_rl_mcp.agent.sandbox.local import MARKER, Limits, LocalSandbox

ESCAPE = "import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(1000)"
"""A daemon in a session of its own, and where it is started with env -i, without our variables."""


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[LocalSandbox]:
    with LocalSandbox("task", root=tmp_path) as made:
        yield made


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def below(root: Path) -> list[int]:
    """Processes whose working folder lies in ``root``."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_output_exit_code_and_input_of_a_command(sandbox: LocalSandbox) -> None:
    result = sandbox.run("cat; echo err >&2; pwd; exit 3", timeout_s=60, stdin=b"in\n")
    assert (result.output.decode(), result.exit_code, result.error) == (f"in\nerr\n{sandbox.workdir}\n", 3, None)
    assert sandbox.run("kill -9 $$", timeout_s=60).exit_code == -signal.SIGKILL
    assert sandbox.run("echo $A ~", timeout_s=60, environ={"A": "1"}).output == f"1 {sandbox.workdir}\n".encode()
    assert sandbox.run("true", timeout_s=60, workdir="nowhere").error is not None
    assert sandbox.run("a\0b", timeout_s=60).exit_code == -1


def test_no_variable_of_ours_but_the_allowed_ones(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-0123456789abcdefgh")
    lines = sandbox.run("env; env -0 </proc/$PPID/environ; cat /proc/$PPID/environ", timeout_s=60).output
    assert b"OPENROUTER" not in lines
    assert MARKER.encode() in lines


def test_a_command_longer_than_an_argument_may_be(sandbox: LocalSandbox) -> None:
    assert sandbox.run(f"echo '{'x' * 300_000}' | wc -c", timeout_s=60).output.strip() == b"300001"


def test_output_beyond_the_limit_loses_its_middle(sandbox: LocalSandbox) -> None:
    result = sandbox.run("echo start; seq 100000; echo end", timeout_s=60, limit_bytes=1000)
    assert result.cut
    assert len(result.output) == 1000
    assert result.output.startswith(b"start\n1\n")
    assert result.output.endswith(b"100000\nend\n")


def test_time_out_ends_all_that_the_command_started_and_nothing_else(sandbox: LocalSandbox, tmp_path: Path) -> None:
    other = sandbox.start("sleep 1001")
    for timeout_s in (1, 10, 100):  # a slow machine may not even come to the echo
        result = sandbox.run("echo before; sleep 1002 & (setsid sleep 1003 &) ; sleep 1004", timeout_s=timeout_s)
        if result.output:
            break
    assert (result.output, result.exit_code) == (b"before\n", 124)
    assert "timed out" in (result.error or "")
    assert other.poll() is None
    names = [" ".join(psutil.Process(pid).cmdline()) for pid in below(tmp_path)]
    assert "sleep 1004" not in names
    assert "sleep 1002" not in names


def test_a_flood_of_output_ends_its_command(tmp_path: Path) -> None:
    with LocalSandbox(root=tmp_path, limits=Limits(output_bytes=1000)) as sandbox:
        result = sandbox.run("yes", timeout_s=120, limit_bytes=10)
    assert "more than 1000 bytes" in (result.error or "")
    assert result.exit_code == -signal.SIGKILL


def test_limits_reach_the_command(tmp_path: Path) -> None:
    with LocalSandbox(root=tmp_path, limits=Limits(file_bytes=4096, open_files=77)) as sandbox:
        assert sandbox.run("ulimit -n", timeout_s=60).output.strip() == b"77"
        told = sandbox.run("head -c 100000 /dev/zero > big; stat -c %s big", timeout_s=60).output
        assert told.split()[-1] == b"4096"


def test_a_background_command_is_written_to_read_waited_for_and_ended(sandbox: LocalSandbox) -> None:
    process = sandbox.start("while read line; do echo got $line; done; exit 5")
    process.write(b"one\n")
    until(lambda: process.output() == b"got one\n")
    assert process.output(4, 3) == b"one"
    process.close_input()
    assert process.wait(60) == 5
    with pytest.raises(OSError):
        process.write(b"more")
    long = sandbox.start("sleep 1000 & sleep 1000")
    assert long.wait(0.01) is None
    long.kill()
    assert long.poll() == -signal.SIGKILL
    assert sandbox.processes() == [process, long]


def test_a_pseudo_terminal_is_one(sandbox: LocalSandbox) -> None:
    process = sandbox.start("tty; read x; echo said $x", pty=True)
    until(lambda: b"/dev/pts" in process.output())
    process.write(b"yes\n")
    assert process.wait(60) == 0
    until(lambda: b"said yes" in process.output())


def test_files_of_any_bytes_below_home_and_elsewhere(sandbox: LocalSandbox) -> None:
    data = os.urandom(3_000_000)
    sandbox.write_bytes("~/a b/'c'.bin", data)
    assert sandbox.read_bytes("a b/'c'.bin") == data
    assert sandbox.run("wc -c < \"a b/'c'.bin\"", timeout_s=60).output.strip() == b"3000000"
    assert sandbox.list_files(".") == ["a b/'c'.bin"]
    with pytest.raises(FileNotFoundError):
        sandbox.read_bytes("none")
    with pytest.raises(NotADirectoryError):
        sandbox.list_files("a b/'c'.bin")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_close_leaves_neither_daemons_nor_unreadable_folders(tmp_path: Path) -> None:
    sandbox = LocalSandbox(root=tmp_path)
    (Path(sandbox.workdir) / "escape.py").write_text(ESCAPE)
    sandbox.run(f"env -i setsid {sys.executable} escape.py; mkdir -p x/y; touch x/y/z; chmod 0 x", timeout_s=60)
    until(lambda: len(below(tmp_path)) == 1)
    sandbox.close()
    sandbox.close()
    assert below(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert sandbox.run("true", timeout_s=60).exit_code == -1


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_nothing_is_left_when_the_process_with_the_sandbox_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom hermes_rl_mcp.agent.sandbox.local import LocalSandbox\n"
        "sandbox = LocalSandbox(root=Path(sys.argv[1]))\nsandbox.start('setsid sleep 1000 & sleep 1000')\n"
        "print('ready', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until(lambda: len(below(tmp_path)) >= 2)
        process.kill()
    until(lambda: below(tmp_path) == [] and list(tmp_path.iterdir()) == [])


def test_a_command_that_kills_its_keeper_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    sandbox = LocalSandbox(root=tmp_path)
    result = sandbox.run("setsid sleep 1000 & kill -9 $PPID; sleep 1000", timeout_s=60)
    assert result.exit_code == -1
    assert result.error == "the sandbox has ended"
    sandbox.close()
    until(lambda: below(tmp_path) == [])
    assert list(tmp_path.iterdir()) == []


BOMB = (
    "import os,time\nfor _ in range(90):\n    if os.fork() == 0:\n        os.setsid()\n        break\ntime.sleep(1000)"
)
"""Bounded in itself: ninety daemons."""


def test_too_many_processes_or_too_much_on_disk_end_all_that_runs_and_the_sandbox_goes_on(tmp_path: Path) -> None:
    with LocalSandbox(root=tmp_path, limits=Limits(processes=50, disk_bytes=4_000_000)) as sandbox:
        other = sandbox.start("sleep 1000")
        sandbox.write_bytes("bomb.py", BOMB.encode())
        result = sandbox.run(f"{sys.executable} bomb.py", timeout_s=120)
        assert (result.exit_code, result.error) == (
            -1,
            "The sandbox had more than 50 processes; all of them were ended.",
        )
        assert other.wait(60) == -1
        filling = sandbox.start("for i in 1 2 3 4 5 6; do head -c 1000000 /dev/urandom > f$i; done; sleep 1000")
        assert filling.wait(120) == -1
        assert "more than 4000000" in str(filling.error)
        until(lambda: below(tmp_path) == [])
        assert sandbox.run("rm f*; echo on", timeout_s=60).output == b"on\n"


def test_a_sandbox_survives_the_loss_of_its_folders(sandbox: LocalSandbox, tmp_path: Path) -> None:
    sandbox.run('rm -rf "$HOME" "$TMPDIR"', timeout_s=60)
    assert sandbox.run("pwd; ls", timeout_s=60).output == f"{sandbox.workdir}\n".encode()
    sandbox.run('rm -rf "$HOME/.."', timeout_s=60)
    sandbox.write_bytes("a", b"again")
    assert sandbox.run("cat a", timeout_s=60).output == b"again"


def test_what_can_only_be_waited_for_is_no_file(sandbox: LocalSandbox) -> None:
    sandbox.run("mkfifo pipe; ln -s /dev/zero endless", timeout_s=60)
    for name in ("pipe", "endless"):
        with pytest.raises(OSError, match="no regular file"):
            sandbox.read_bytes(name)
    for name in ("pipe", "endless"):
        with pytest.raises(OSError):
            sandbox.write_bytes(name, b"x")


def test_close_changes_nothing_that_a_link_points_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").touch()
    sandbox = LocalSandbox(root=tmp_path)
    sandbox.run(f"ln -s {outside} link; mkdir shut; touch shut/f; chmod 0 shut", timeout_s=60)
    tries: list[str] = []
    remove = shutil.rmtree

    def only_the_second_time(path: str, **options: Any) -> None:  # as for a user who is not root
        tries.append(path)
        if len(tries) > 1:
            remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", only_the_second_time)
    sandbox.close()
    assert [one.name for one in tmp_path.iterdir()] == ["outside"]
    assert (outside.stat().st_mode & 0o777, (outside / "kept").exists()) == (0o755, True)


def test_requests_from_many_threads_do_not_mix(sandbox: LocalSandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: sandbox.run(f"echo {n}", timeout_s=120).output, range(100)))
    assert found == [f"{n}\n".encode() for n in range(100)]


def test_commands_leave_no_descriptor(sandbox: LocalSandbox) -> None:
    sandbox.run("true", timeout_s=60)
    before = psutil.Process().num_fds()
    for _ in range(20):
        sandbox.run("true", timeout_s=60)
    assert psutil.Process().num_fds() == before

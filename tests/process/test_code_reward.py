"""Programs out of answers are run within their bounds, and nothing of them is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from leash import leash, leashed

from hermes_rl_mcp.envs.rewards import Limits, PythonTests
from hermes_rl_mcp.envs.rewards.execution import run_python
from hermes_rl_mcp.errors import PreflightError
from hermes_rl_mcp.paths import install_root

PATIENT = Limits(time_s=60)
NAMESPACES = (
    sys.platform.startswith("linux")
    and not subprocess.run(["unshare", "-Urpn", "--fork", "true"], check=False, capture_output=True).returncode
)
needs_namespaces = pytest.mark.skipif(not NAMESPACES, reason="this kernel gives no user namespaces")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made; each test must leave it empty."""
    made = tmp_path / "temp"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    return made


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        pytest.param(
            "```python\ndef f(x):\n    return x + 1\n```", ["assert f(1) == 2", "assert f(1) == 3"], 0.5, id="half"
        ),
        pytest.param("x = 1", "assert x == 1", 1.0, id="without a block"),
        pytest.param("def f(:", "assert True", 0.0, id="no Python"),
        pytest.param("import os\nos._exit(0)", "assert False", 0.0, id="ends itself with success"),
        pytest.param("import sys\nsys.exit(0)", ["assert True"], 0.0, id="ends itself before the tests"),
        pytest.param("print(int(input()) * 2)", [("4\n", "8\n"), ("5", "11")], 0.5, id="by output"),
        pytest.param("```py\na = 1\n```\nor\n```\na = 2\n```", "assert a == 2", 1.0, id="last block"),
        pytest.param("a = '\ud83d'", "assert True", 0.0, id="half an emoji"),
    ],
)
def test_the_share_of_tests_that_pass_is_the_reward(answer: str, gold: str, value: float, folder: Path) -> None:
    assert PythonTests(PATIENT).check(answer, gold) == value
    assert not list(folder.iterdir())


def test_all_or_nothing_gives_nothing_for_half() -> None:
    assert PythonTests(PATIENT, all_or_nothing=True).check("x = 1", ["assert x == 1", "assert x == 2"]) == 0.0


def test_a_program_that_does_not_end_is_ended_with_all_it_started(folder: Path) -> None:
    source = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        open("grandchild", "w")
    time.sleep(1000)
print("begun", flush=True)
time.sleep(1000)
"""
    done = run_python(source, limits=Limits(time_s=3))
    assert done.timed_out and not done.succeeded
    assert not _left_in(folder)


@needs_namespaces
def test_what_a_program_leaves_behind_in_a_session_of_its_own_is_ended(folder: Path) -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print('in', flush=True)\n    time.sleep(1000)\n"
    done = run_python(source, limits=PATIENT)
    assert done.succeeded
    assert not _left_in(folder)


@needs_namespaces
def test_there_is_no_network_unless_it_is_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('through')"
        assert b"through" not in run_python(source, limits=PATIENT).output
        assert b"through" in run_python(source, limits=Limits(time_s=60, network="on")).output


def test_a_program_ends_with_the_process_that_runs_it(folder: Path) -> None:
    source = f"import os, time\nos.chdir({str(folder)!r})\nprint(os.fork(), flush=True)\ntime.sleep(1000)"
    caller = (
        "import os\nfrom hermes_rl_mcp import lifeline\nfrom hermes_rl_mcp.envs.rewards.execution import *\n"
        f"lifeline.watch(os.environ)\nrun_python({source!r}, limits=Limits(time_s=1000))"
    )
    environ = {**leashed(dict(os.environ)), "PYTHONPATH": str(install_root()), "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", caller], env=environ, pass_fds=[leash()]) as process:
        _until(lambda: len(_left_in(folder)) >= 3)  # the one around it, the program and its child
        process.kill()
    _until(lambda: not _left_in(folder) and not list(folder.iterdir()))


def test_endless_output_ends_the_program() -> None:
    done = run_python("while True: print('x' * 1000)", limits=Limits(time_s=1000, output_bytes=5000))
    assert done.too_much_output and not done.succeeded
    assert len(done.output) == 5000


def test_memory_and_files_are_bounded() -> None:
    limits = Limits(time_s=60, memory_bytes=300 << 20, file_bytes=1000)
    assert b"MemoryError" in run_python("x = bytearray(1 << 30)", limits=limits).output
    assert not run_python("with open('big', 'wb') as file: file.write(b'x' * 2000)", limits=limits).succeeded


@needs_namespaces
def test_processes_are_bounded() -> None:
    if os.getuid() == 0:
        pytest.skip("the superuser has no such bound")
    source = "import os, time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(1000)\n"
    assert b"BlockingIOError" in run_python(source, limits=Limits(time_s=60, processes=10)).output


def test_a_program_sees_no_keys_and_only_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    done = run_python("import os\nprint(dict(os.environ))\nprint(sorted(os.listdir()))", limits=PATIENT)
    assert b"secret-key" not in done.output
    assert b"['program.py']" in done.output


def test_where_the_network_must_be_off_and_cannot_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without = tmp_path / "without.py"
    without.write_text("import sys\nsys.stderr.write('no namespaces\\n')\nsys.exit(125)\n")
    monkeypatch.setattr("hermes_rl_mcp.envs.rewards.confinement.__file__", str(without))
    with pytest.raises(PreflightError, match="no namespaces"):
        run_python("print('run')", limits=Limits(time_s=60, network="required"))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _left_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found

"""The docker sandbox against a stand-in for the command line, which runs things here, and on a real engine if any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_rl_mcp.agent.sandbox.docker import DEFAULT_IMAGE, LABEL, DockerOptions, DockerSandbox
from hermes_rl_mcp.agent.sandbox.factory import task_sandbox
from hermes_rl_mcp.errors import InvalidValueError, PreflightError

STAND_IN = """#!{python}
import json, os, sys
folder = os.path.dirname(__file__)
words = sys.argv[1:]
with open(folder + "/said", "a") as file:
    file.write(json.dumps(words) + "\\n")
if words[0] == "run":
    if "no-such-image" in words:
        sys.exit("Unable to find image")
    os.makedirs(words[words.index("-w") + 1], exist_ok=True)
elif words[0] == "exec":
    words = words[1:]
    while words[0].startswith("-"):
        option = words.pop(0)
        if option == "-w":
            os.chdir(words.pop(0))
        elif option == "-e":
            name, _, value = words.pop(0).partition("=")
            os.environ[name] = value
    if os.fork() == 0:  # as in a container: not the command line's child
        os.setsid()
        os.execvp(words[1], words[1:])
    code = os.waitstatus_to_exitcode(os.wait()[1])
    sys.exit(code if code >= 0 else 128 - code)
"""


def engine_runs() -> bool:
    docker = shutil.which("docker")
    found = docker and subprocess.run([docker, "image", "inspect", DEFAULT_IMAGE], capture_output=True).returncode == 0
    return bool(found)


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "engine",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not engine_runs(), reason=f"no docker engine with the image {DEFAULT_IMAGE} here"),
            ],
        ),
    ]
)
def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DockerSandbox]:
    if request.param == "engine":
        made = DockerSandbox("task")
    else:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir()
        program.write_text(STAND_IN.format(python=sys.executable))
        program.chmod(0o755)
        made = DockerSandbox("task", DockerOptions(workdir=str(tmp_path / "work")), program=str(program))
    yield made
    made.close()
    made.close()
    assert made.run("true", timeout_s=60).exit_code == -1
    if request.param == "engine":
        argv = ["docker", "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        assert subprocess.run(argv, capture_output=True, check=True).stdout == b""
    else:
        said = (tmp_path / "bin" / "said").read_text().splitlines()
        assert '"--network", "none"' in said[0]
        assert f'"--label", "{LABEL}=task"' in said[0]
        assert said[-1].startswith('["rm", "-f"')


def test_commands_and_files_in_a_container(sandbox: DockerSandbox) -> None:
    result = sandbox.run("cat; pwd; echo $A; exit 3", timeout_s=60, stdin=b"in\n", environ={"A": "it's"})
    assert (result.output.decode(), result.exit_code) == (f"in\n{sandbox.workdir}\nit's\n", 3)
    data = os.urandom(300_000)
    sandbox.write_bytes("a b/'c'", data)
    assert sandbox.read_bytes("a b/'c'") == data
    assert sandbox.list_files(".") == ["a b/'c'"]
    for path, error in (("none", FileNotFoundError), ("a b", IsADirectoryError)):
        with pytest.raises(error):
            sandbox.read_bytes(path)
    with pytest.raises(NotADirectoryError):
        sandbox.list_files("a b/'c'")
    with pytest.raises(OSError):
        sandbox.write_bytes("a b/'c'/d", b"")


def test_time_out_and_kill_end_what_runs_in_the_container(sandbox: DockerSandbox) -> None:
    for timeout_s in (1, 10, 100):  # a slow machine may not even come to the echo
        result = sandbox.run("echo before; sleep 1234 & sleep 1234", timeout_s=timeout_s)
        if result.output:
            break
    assert (result.output, result.exit_code) == (b"before\n", 124)
    process = sandbox.start("echo $$ > pid; sleep 1235")
    deadline = time.monotonic() + 60
    while sandbox.run("test -s pid", timeout_s=60).exit_code != 0:
        assert time.monotonic() < deadline
    process.kill()
    assert process.poll() is not None
    while sandbox.run("kill -0 $(cat pid)", timeout_s=60).exit_code == 0:
        assert time.monotonic() < deadline


def test_a_container_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    with pytest.raises(PreflightError, match=r"container of no-such-image: Unable to find image.*local"):
        DockerSandbox(options=DockerOptions(image="no-such-image"), program=str(program))
    with pytest.raises(PreflightError, match="no program docker"):
        DockerSandbox(program=str(tmp_path / "none"))
    with pytest.raises(InvalidValueError, match=r"'modal'.*local, docker"):
        task_sandbox("modal", "task")

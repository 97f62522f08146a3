"""``hermes-rl serve``: the endpoint a person starts, as the openai client sees it, until Ctrl-C."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import openai
import psutil
import pytest
from run_weights import RUN_ID, make_run

from hermes_rl_mcp.paths import Home


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "hermes_rl_mcp.cli.main", "serve", *arguments]


@contextmanager
def served(environ: dict[str, str], log: IO[str], *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and what it printed once it was ready."""
    process = subprocess.Popen(
        command(*arguments), env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        assert process.stdout is not None
        yield process, "".join(process.stdout.readline() for _ in range(3))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(100)
        process.stdout.close()


@pytest.mark.slow
def test_a_run_is_served_until_ctrl_c_with_its_adapter_and_its_base(environ: dict[str, str], tmp_path: Path) -> None:
    make_run(Home(Path(environ["HERMES_HOME"])), tmp_path / "my-base")
    with (tmp_path / "log").open("w+") as log, served(environ, log, RUN_ID, "--port", "0") as (process, said):
        assert "/v1" in said, (tmp_path / "log").read_text()
        address = said.split("address ")[1].split()[0]
        assert address.startswith("http://127.0.0.1:")
        words = shlex.split(said.split("try")[1])
        assert words[0] == "curl" and json.loads(words[-1])["model"] == RUN_ID
        reply = json.loads(subprocess.run([*words, "-s"], capture_output=True, check=True, timeout=200).stdout)
        assert reply["model"] == RUN_ID and reply["choices"][0]["message"]["content"]
        children = psutil.Process(process.pid).children()
        with openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=200) as client:
            assert [one.id for one in client.models.list()] == [RUN_ID, "my-base"]
            asked = {"messages": [{"role": "user", "content": "2+3="}], "temperature": 0, "max_tokens": 12}
            texts = {}
            for name in (RUN_ID, "my-base"):
                whole = client.chat.completions.create(model=name, **asked)
                chunks = client.chat.completions.create(model=name, stream=True, **asked)
                texts[name] = whole.choices[0].message.content
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[name]
            assert texts[RUN_ID] != texts["my-base"]
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
        gone, alive = psutil.wait_procs(children, timeout=100)
        assert gone and not alive


def test_what_cannot_be_served_is_told_before_anything_starts(environ: dict[str, str], tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        done = subprocess.run(command(*arguments), env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 1 and not done.stdout
        return done.stderr

    assert "--allow-remote" in refused("builtin:tiny", "--host", "0.0.0.0")
    assert "not found" in refused("deadbeef")
    assert "--step is of a run" in refused("builtin:tiny", "--step", "3")


@pytest.mark.slow
def test_killing_the_command_ends_the_endpoint(environ: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log, served(environ, log, "builtin:tiny", "--port", "0") as (process, said):
        assert "serving builtin:tiny (default)" in said
        children = psutil.Process(process.pid).children()
        assert children
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=100)
        assert not alive

"""Not collected by itself: a test that holds one process of each kind which tests start by hand, until it is killed.

``pytest held_processes.py`` with ``HELD_READY`` naming the file in which it says so.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from env_rig import TINY, Api, EnvProcess, child_environ, run_env, write_config, write_env
from process_rig import HOLD, Rig
from rollout_rig import running
from test_server_process import http_server
from three_processes import run_directory

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]


def start_env(folder: Path, environ: dict[str, str], url: str) -> EnvProcess:
    values = {"group_size": 2, "batch_size": 4, "tokenizer_name": str(TINY), "rollout_server_url": url}
    config = write_config(folder, values, {"base_url": "http://127.0.0.1:1/v1", "server_type": "vllm"})
    spec = f"{write_env(folder)}:CountingEnv"
    return run_env(folder, child_environ(environ), spec, "serve", "--config", str(config))


async def test_until_killed(rig: Rig, tmp_path: Path, environ: dict[str, str]) -> None:
    by_hand, for_env = tmp_path / "by_hand", tmp_path / "for_env"
    by_hand.mkdir()
    for_env.mkdir()
    api = Api(for_env, child_environ(environ))
    api.start()
    env = start_env(for_env, environ, api.url)
    with (
        running(by_hand),
        run_directory(tmp_path / "three", environ) as run,
        http_server(environ, "streamable-http"),
    ):
        run.start("api")
        await rig.running(await rig.start(HOLD))
        assert env.process.poll() is None, env.text
        say_ready()
        threading.Event().wait(600)


def say_ready() -> None:
    Path(os.environ["HELD_READY"]).write_text(os.environ["HERMES_RL_TEST_MARK"])

"""FI-28: W&B can fail in any way without reaching training. The sink's process is real; what it loads as ``wandb`` is
a few lines that fail or hang where they are told to, and in the last tests the real package against real sockets."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from trainer_parts import until

from hermes_rl_mcp.contracts.records import WandbState
from hermes_rl_mcp.paths import install_root
from trainer.wandb_sink import WandbSink

STAND_IN = """
import json, os, time

def Settings(**values):
    return values

def teardown():
    pass

class Run:
    offline, url = False, "https://wandb.example/run"

    def __init__(self, directory):
        self.dir = os.path.join(directory, "wandb", "run-1", "files")
        self.out = open(os.environ["OUT"], "a")

    def _write(self, value):
        self.out.write(json.dumps(value) + chr(10))
        self.out.flush()

    def log(self, values, step):
        if step == int(os.environ.get("FAIL_AT", "-1")):
            raise ConnectionError("the service is gone")
        self._write([step, values])

    def finish(self):
        if "HANG" in os.environ:
            time.sleep(600)
        self._write("finished")

def init(mode=None, **settings):
    if "BROKEN" in os.environ:
        raise RuntimeError("no permission")
    return Run(settings["dir"])
"""
NEEDS_WANDB = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is an optional extra")


def _sink(tmp_path: Path, *, finish_s: float = 30.0, stand_in: bool = True, **variables: str) -> WandbSink:
    package = tmp_path / "packages"
    package.mkdir()
    if stand_in:
        (package / "wandb.py").write_text(textwrap.dedent(STAND_IN))
    environ = {
        **{name: os.environ[name] for name in ("PATH", "HERMES_RL_TEST_MARK")},
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{package}:{install_root()}",
        "OUT": str(tmp_path / "out"),
        **variables,
    }
    return WandbSink(
        project="p",
        group="g",
        name="n",
        folder=tmp_path,
        config={},
        state_file=tmp_path / "wandb.json",
        environ=environ,
        finish_s=finish_s,
    )


def _state(tmp_path: Path) -> WandbState:
    return WandbState.model_validate_json((tmp_path / "wandb.json").read_text())


def test_known_values_arrive_under_their_step(tmp_path: Path) -> None:
    sink = _sink(tmp_path)
    sink.log(1, {"reward/mean": 0.5, "train/loss": None})
    sink.log(2, {"reward/mean": 0.6})
    state = sink.finish()
    written = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert written == [[1, {"reward/mean": 0.5}], [2, {"reward/mean": 0.6}], "finished"]
    assert (state.state, state.url, state.error) == ("finished", "https://wandb.example/run", None)
    assert _state(tmp_path) == state


@pytest.mark.parametrize(
    ("variables", "says"), [({"BROKEN": "1"}, "no permission"), ({"FAIL_AT": "2"}, "the service is gone")]
)
def test_fi_28_a_failure_at_the_start_or_midway_reaches_nobody_and_is_told(
    tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    sink = _sink(tmp_path, **variables)
    for step in range(1, 5000):
        sink.log(step, {"reward/mean": 0.5})
    state = sink.finish()
    assert state.state == "failed" and says in (state.error or "")
    assert _state(tmp_path) == state


def test_fi_28_a_finish_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    sink = _sink(tmp_path, HANG="1", finish_s=0.5)
    sink.log(1, {"reward/mean": 0.5})
    until(lambda: (tmp_path / "out").exists() and bool((tmp_path / "out").read_text()))
    before = time.monotonic()
    state = sink.finish()
    assert time.monotonic() - before < 30
    assert "did not finish" in (state.error or "")
    assert not psutil.pid_exists(sink._child.pid)


class _Refuses(http.server.BaseHTTPRequestHandler):
    """What W&B says to a wrong key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'{"errors":[{"message":"invalid key"}]}'
        self.send_response(401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def refusing() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@NEEDS_WANDB
@pytest.mark.slow
@pytest.mark.parametrize("key", ["none", "wrong"])
def test_fi_28_the_real_package_without_a_good_key_keeps_the_run_offline_and_says_so(
    tmp_path: Path, refusing: str, key: str
) -> None:
    variables = {"WANDB_BASE_URL": refusing, **({"WANDB_API_KEY": "a" * 40} if key == "wrong" else {})}
    sink = _sink(tmp_path, stand_in=False, finish_s=60.0, **variables)
    sink.log(1, {"reward/mean": 0.5})
    state = sink.finish()
    assert (state.error or "").startswith("offline: "), state
    assert "wandb sync" in (state.error or "")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@NEEDS_WANDB
def test_fi_28_the_real_package_without_a_network_is_left_behind_in_time(tmp_path: Path) -> None:
    variables = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    sink = _sink(tmp_path, stand_in=False, finish_s=3.0, **variables)
    sink.log(1, {"reward/mean": 0.5})
    before = time.monotonic()
    state = sink.finish()
    assert time.monotonic() - before < 30
    assert "did not finish within 3 s" in (state.error or "")

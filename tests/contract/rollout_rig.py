"""A real rollout API process on a free port, and the bodies that its clients send."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from leash import leash, leashed

START_TIMEOUT_S = 100.0


class RolloutServer:
    """Started on a socket that stays bound while the process is replaced, so that a restart keeps its address."""

    def __init__(self, log: Path, *arguments: str, prefix: str = "", environ: dict[str, str] | None = None) -> None:
        self.log = log
        self.arguments = arguments
        self.prefix = prefix
        self.environ = environ or {}
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}{prefix}", timeout=90)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, pass_fds: tuple[int, ...] = ()) -> RolloutServer:
        fd = self.socket.fileno()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hermes_rl_mcp.rollout_api", "--listen-fd", str(fd), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=leashed({**os.environ, **self.environ}),
                pass_fds=(fd, leash(), *pass_fds),
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.HTTPError):
                self.client.get("/health", timeout=1)
                return self
            time.sleep(0.02)
        raise AssertionError("not ready: " + self.log.read_text())

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        assert self.process
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill_and_restart(self) -> None:
        self.end(signal.SIGKILL)
        self.start()

    def close(self) -> None:
        self.client.close()
        if self.process and self.process.poll() is None:
            self.end()
        self.socket.close()

    def raw(self) -> socket.socket:
        """An unbuffered client connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=90)

    # What clients do

    def register(self, **changes: Any) -> int:
        reply = self.client.post("/register", json=registration(**changes))
        assert reply.status_code == 200, reply.text
        return int(reply.json()["uuid"])

    def register_env(self, **changes: Any) -> int:
        """After the trainer's first poll."""
        self.client.get("/batch")
        reply = self.client.post("/register-env", json=env_registration(**changes))
        assert reply.status_code == 200, reply.text
        return int(reply.json()["env_id"])

    def post(self, body: Any) -> dict[str, Any]:
        reply = self.client.post("/scored_data", json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def batch(self, lease: bool = False) -> dict[str, Any]:
        reply = self.client.get("/batch", params={"lease": 1} if lease else {})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def tags(self, lease: bool = False) -> list[int] | None:
        """The tags of the next batch's groups, in order."""
        batch = self.batch(lease)["batch"]
        return None if batch is None else [tag_of(group) for group in batch]

    def step(self) -> int:
        return int(self.client.get("/status").json()["current_step"])


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[RolloutServer]:
    server = RolloutServer(folder / "api.log", *arguments, **options)
    try:
        yield server.start()
    finally:
        server.close()


def run_of_tags(server: RolloutServer) -> list[int]:
    """Takes batches until there is none; the tags of all their groups."""
    found: list[int] = []
    while (tags := server.tags()) is not None:
        found += tags
    return found


def registration(**changes: Any) -> dict[str, Any]:
    return {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": 8,
        "max_token_len": 512,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 5,
        "starting_step": 0,
        "num_steps": 100,
        **changes,
    }


def env_registration(**changes: Any) -> dict[str, Any]:
    return {"max_token_length": 512, "desired_name": "gsm8k", "weight": 1.0, "group_size": 4, **changes}


def group(tag: int, size: int = 4, length: int = 3, **changes: Any) -> dict[str, Any]:
    """``size`` sequences of a one-token prompt, which is the tag, and ``length - 1`` trained tokens."""
    tokens = [[tag, *range(100 + row, 100 + row + length - 1)] for row in range(size)]
    return {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": [row / size for row in range(size)],
        "inference_logprobs": [[1.0] + [-0.25 - row / 7] * (length - 1) for row in range(size)],
        **changes,
    }


def tag_of(body: dict[str, Any]) -> int:
    return int(body["tokens"][0][0])

"""The three processes of a run, started by hand as the supervisor does: rollout API, trainer, environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from leash import leash, leashed

from hermes_rl_mcp.contracts.runs import ChildReport
from hermes_rl_mcp.paths import RunPaths, bundled_environments, install_root

NONCE = "c0ffee"
PREFIX = "secret"
_STOP_S = 100.0


@dataclass
class Run:
    """One run directory and the processes that work in it."""

    paths: RunPaths
    environ: dict[str, str]
    ports: dict[str, int]
    sockets: dict[str, socket.socket]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def trainer_url(self) -> str:
        return f"http://127.0.0.1:{self.ports['trainer']}/{PREFIX}"

    def start(self, name: str, *extra: str) -> subprocess.Popen[bytes]:
        environment = f"{bundled_environments() / 'arithmetic.py'}:ArithmeticEnv"
        target = {
            "api": ["hermes_rl_mcp.rollout_api"],
            "trainer": ["trainer"],
            "env": ["hermes_rl_mcp.envs", environment, "serve"],
        }[name]
        fds = [self.sockets[name].fileno()] if name in self.sockets else []
        arguments = ["-P", "-m", *target, "--config", str(self.paths.config), *extra]
        for fd in fds:
            arguments += ["--listen-fd", str(fd)]
        with (self.paths.dir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=leashed({**self.environ, "PYTHONPATH": str(install_root()), "OMP_WAIT_POLICY": "PASSIVE"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[*fds, leash()],
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.paths.dir / f"{name}.log").read_text()

    def health(self) -> dict[str, Any]:
        """Empty while nothing answers."""
        try:
            reply = httpx.get(f"{self.trainer_url}/health", timeout=30, trust_env=False)
        except httpx.TransportError:
            return {}
        return dict(reply.json())

    def wait(self, what: Callable[[], bool], timeout_s: float, *, alive: str = "trainer") -> None:
        """Until ``what`` holds; fails when the deadline passes or the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not what():
            assert self.processes[alive].poll() is None, self.log(alive)
            assert time.monotonic() < deadline, self.log(alive)
            time.sleep(0.05)

    def metrics(self) -> list[dict[str, Any]]:
        if not self.paths.metrics.exists():
            return []
        return [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]

    def report(self) -> ChildReport:
        return ChildReport.model_validate_json(self.paths.report("trainer").read_text())

    def end(self, name: str) -> int:
        """SIGTERM, then the exit code."""
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        return process.wait(_STOP_S)


def write_config(
    paths: RunPaths,
    ports: Mapping[str, int],
    *,
    model_path: str,
    env: dict[str, Any],
    trainer: dict[str, Any],
    model: str = "builtin:tiny",
) -> None:
    values = {
        "run": {
            "run_id": paths.run_id,
            "environment": "arithmetic",
            "env_file": str(bundled_environments() / "arithmetic.py"),
            "env_class": "ArithmeticEnv",
            "env_sha256": "0",
            "profile": "local",
            "base_model": model,
            "model_path": model_path,
            "nonce": NONCE,
            "path_prefix": PREFIX,
        },
        "ports": {"rollout_api": ports["api"], "trainer": ports["trainer"]},
        "env": {
            "group_size": 8,
            "batch_size": 64,
            "total_steps": 6,
            "max_token_length": 12,
            "max_batches_offpolicy": 1,
            "steps_per_eval": -1,
            "use_wandb": False,
            "ensure_scores_are_not_same": False,
            "tokenizer_name": model_path,
            "rollout_server_url": f"http://127.0.0.1:{ports['api']}/{PREFIX}",
            **env,
        },
        "openai": [
            {"model_name": model, "base_url": f"http://127.0.0.1:{ports['trainer']}/{PREFIX}/v1", "server_type": "vllm"}
        ],
        "trainer": {"learning_rate": 1e-3, "lora_rank": 16, "torch_threads": 1, "device": "cpu", **trainer},
    }
    paths.config.write_text(yaml.safe_dump(values))


@contextmanager
def run_directory(
    folder: Path,
    environ: Mapping[str, str],
    *,
    model_path: str | None = None,
    model: str = "builtin:tiny",
    env: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> Iterator[Run]:
    """A run directory with its config and bound sockets; what was started is ended at the end."""
    paths = RunPaths(folder / "0123abcd")
    paths.dir.mkdir(parents=True)
    sockets = {}
    for name in ("api", "trainer"):
        sockets[name] = socket.socket()
        sockets[name].bind(("127.0.0.1", 0))
    ports = {name: one.getsockname()[1] for name, one in sockets.items()}
    write_config(
        paths,
        ports,
        model_path=model_path or str(folder / "models" / "tiny"),
        model=model,
        env=env or {},
        trainer=trainer or {},
    )
    run = Run(paths, {"PATH": os.environ["PATH"], **environ}, ports, sockets)
    try:
        yield run
    finally:
        for process in run.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(_STOP_S)
        for one in sockets.values():
            one.close()

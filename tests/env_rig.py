"""Around an environment process: a scripted sampler, the real rollout API, and a trainer's side of it.

The sampler speaks the wire of port 8001 over real HTTP and answers what a test scripts, so that failures, lost answers
and ids that no tokenizer would produce can be put in front of the environment on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import uvicorn
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from leash import leash, leashed

from hermes_rl_mcp.paths import install_root

TINY = install_root() / "trainer" / "models" / "tiny"
END_ID = 257
DEADLINE_S = 100.0

Answer = Callable[[list[int], int], list[int]]
"""Prompt ids and which completion of the call to the sampled ids."""


def say(text: str) -> Answer:
    """Always the same text, ended by the model itself. In the tiny tokenizer an id is a byte."""
    return lambda prompt, index: [*text.encode(), END_ID]


@dataclass
class Sampler:
    """``answer`` may be replaced at any time. ``statuses`` are given out first, one per request."""

    answer: Answer = field(default_factory=lambda: say("8"))
    statuses: list[int] = field(default_factory=list)
    said: str = "scripted"
    """What comes with a status."""
    drop_next: int = 0
    """Connections to close without an answer."""
    delay_s: float = 0.0
    delays: Callable[[], float] | None = None
    """Of each request, in place of ``delay_s``."""
    policy_version: int = 3
    """As it stands when a request arrives."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies in order, with the path under ``path``."""
    answered_choices: int | None = None
    """For /v1: this many choices whatever n says."""
    reply: Any = None
    """Answered by /generate as it stands, if set."""
    url: str = ""

    def completion(self, prompt: list[int], index: int, limit: int) -> tuple[list[int], list[float], str]:
        ids = self.answer(prompt, index)[:limit]
        logprobs = [-(position + 1) / 64 for position in range(len(ids))]
        return ids, logprobs, "stop" if ids and ids[-1] == END_ID else "length"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/generate")
        async def generate(request: Request) -> Response:
            body = await self._arrived(request)
            if early := self._scripted():
                return early
            if self.reply is not None:
                return JSONResponse(self.reply)
            return JSONResponse(self._sglang(body) if "input_ids" in body else self._vllm(body))

        @app.post("/generate/")
        async def trl(request: Request) -> Response:
            body = await self._arrived(request)
            made = [self.completion([], i, body["max_tokens"]) for i in range(body["n"])]
            return JSONResponse({"completion_ids": [ids for ids, _, _ in made]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await self._arrived(request)
            if early := self._scripted():
                return early
            count = self.answered_choices or body["n"]
            choices = [
                {"index": i, "finish_reason": "stop", "message": {"content": self._text(i)}} for i in range(count)
            ]
            return JSONResponse({"choices": choices})

        return app

    def _text(self, index: int) -> str:
        ids, _, _ = self.completion([], index, 10_000)
        return bytes(one for one in ids if one < 256).decode(errors="replace")

    async def _arrived(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.requests.append({**body, "path": request.url.path, "headers": dict(request.headers)})
        body["policy_version"] = self.policy_version
        if delay_s := self.delays() if self.delays else self.delay_s:
            await anyio.sleep(delay_s)
        return body

    def _scripted(self) -> Response | None:
        return Response(self.said, self.statuses.pop(0)) if self.statuses else None

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"]["prompt_token_ids"]
        made = [self.completion(prompt, i, body["max_tokens"]) for i in range(body.get("n", 1))]
        # Each given token has probability 1/2, and the one after it 1/4.
        scored = [[{str(one): -0.6931}, {str((one + 1) % 256): -1.3863}] for one in prompt[1:]]
        return {
            "prompt_logprobs": [None, *scored] if "prompt_logprobs" in body else None,
            "text": ["" for _ in made],
            "token_ids": [ids for ids, _, _ in made],
            "prompt_token_ids": prompt,
            "logprobs": [[[{str(i): lp}] for i, lp in zip(ids, lps, strict=True)] for ids, lps, _ in made],
            "finish_reasons": [finish for _, _, finish in made],
            "policy_version": body["policy_version"],
        }

    def _sglang(self, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        made = [self.completion(body["input_ids"], i, params["max_new_tokens"]) for i in range(params.get("n", 1))]
        replies = [
            {
                "text": "",
                "meta_info": {
                    "prompt_tokens": len(body["input_ids"]),
                    "completion_tokens": len(ids),
                    "finish_reason": {"type": finish},
                    "output_token_logprobs": [[lp, i, None] for i, lp in zip(ids, lps, strict=True)],
                    "policy_version": body["policy_version"],
                },
            }
            for ids, lps, finish in made
        ]
        return replies[0] if len(replies) == 1 else replies


def _cutting(app: FastAPI, sampler: Sampler) -> Any:
    """Answers of ``drop_next`` requests end before their announced length, as those of a killed server do."""

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and sampler.drop_next:
            sampler.drop_next -= 1
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
            return
        await app(scope, receive, send)

    return cut


@contextlib.contextmanager
def http_server(app: Any) -> Iterator[str]:
    """``app`` on a free loopback port, in a thread; gives its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", http="h11", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@contextlib.contextmanager
def serving(sampler: Sampler) -> Iterator[Sampler]:
    with http_server(_cutting(sampler.app(), sampler)) as sampler.url:
        yield sampler


def until(condition: Callable[[], Any], timeout_s: float = DEADLINE_S, why: Callable[[], str] = lambda: "") -> Any:
    """Polls until the condition holds; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s. {why()}"
        threading.Event().wait(0.02)


class Api:
    """The real rollout API as a process, and a trainer's requests. The socket stays, so a restart keeps the port."""

    def __init__(self, folder: Path, environ: dict[str, str], *arguments: str) -> None:
        self.log = folder / "api.log"
        self._arguments = arguments
        self._environ = environ
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.process: subprocess.Popen[bytes] | None = None
        self._received_before = 0

    def start(self) -> None:
        fd = self._socket.fileno()
        command = [sys.executable, "-P", "-m", "hermes_rl_mcp.rollout_api", "--listen-fd", str(fd)]
        command += self._arguments
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=leashed(self._environ),
                pass_fds=(fd, leash()),
            )
        until(self._alive, why=lambda: self.log.read_text())

    def _alive(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/health").status_code == 200
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        self.http.close()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._socket.close()

    # A trainer's side.

    def register_trainer(
        self, *, batch_size: int, num_steps: int = 1000, max_token_len: int = 512, **more: Any
    ) -> None:
        body = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": batch_size,
            "max_token_len": 512,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": num_steps,
        }
        assert self.http.post("/register", json={**body, **more}).status_code == 200
        self.take()

    def take(self) -> list[dict[str, Any]] | None:
        """The next batch, acknowledged; None while there is none."""
        reply = self.http.get("/batch", params={"lease": 1}).json()
        if reply["batch"] is not None:
            self.acknowledge(reply["lease_id"])
        return reply["batch"]

    def lease(self) -> str | None:
        """The lease of the next batch, which stays out."""
        return self.http.get("/batch", params={"lease": 1}).json()["lease_id"]

    def acknowledge(self, lease_id: str) -> None:
        self.http.post("/acknowledge", json={"lease_id": lease_id})

    def next_batch(self) -> list[dict[str, Any]]:
        return until(self.take, why=lambda: self.log.read_text()[-2000:])

    def reset(self) -> None:
        self.http.get("/reset_data")
        self._received_before = self.health()["groups_received"]

    def received(self) -> int:
        """Groups since the last reset."""
        return self.health()["groups_received"] - self._received_before

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()


@dataclass
class EnvProcess:
    """One environment process. ``output`` is a file, so that nothing blocks on a pipe."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def stop(self, timeout_s: float = 100) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout_s)


def run_env(
    folder: Path,
    environ: dict[str, str],
    *arguments: str,
    cwd: Path | None = None,
    program: tuple[str, ...] = (sys.executable, "-P", "-m", "hermes_rl_mcp.envs"),
) -> EnvProcess:
    """``python -P -m hermes_rl_mcp.envs *arguments``, or another program, started."""
    output = folder / "env.log"
    command = [*program, *arguments]
    environ = leashed({**environ, "PYTHONPATH": str(install_root())})
    with output.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            cwd=cwd,
            start_new_session=True,
            pass_fds=(leash(),),
        )
    return EnvProcess(process, output)


def write_config(folder: Path, env: dict[str, Any], server: dict[str, Any], **more: Any) -> Path:
    """A run's ``config.yaml`` as the supervisor writes it."""
    run = {
        "run_id": "0123abcd",
        "environment": "test",
        "env_file": "x.py",
        "env_class": "X",
        "env_sha256": "0",
        "profile": "local",
        "base_model": "builtin:tiny",
        "model_path": str(TINY),
        "nonce": "nonce",
        "path_prefix": "",
    }
    document = {
        "run": run,
        "ports": {"rollout_api": 1, "trainer": 2},
        "env": env,
        "openai": [{"model_name": "builtin:tiny", "api_key": "x", "weight": 1.0, "num_requests_for_eval": 8, **server}],
        "trainer": {},
        "slurm": False,
        "testing": False,
        **more,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def child_environ(environ: dict[str, str]) -> dict[str, str]:
    """With what keeps a child light on two cores."""
    return {**environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(install_root()), "PATH": os.environ["PATH"]}


COUNTING_ENV = """
from hermes_rl_mcp.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Score

class CountingEnv(BaseEnv):
    "Asks for numbers in order."
    name = "counting"

    async def setup(self):
        self.count = 0
        self.scored = 0

    async def get_next_item(self):
        self.count += 1
        return self.count

    def get_messages(self, item):
        return [{"role": "user", "content": f"{item}"}]

    def score_answer(self, item, completion):
        self.scored += 1
        return Score(float(len(completion.text)), {"correct": float(completion.text == "8")})

    async def evaluate(self):
        [trajectory] = await self.server.chat([{"role": "user", "content": "eval"}], temperature=0.0, split="eval")
        return {"eval/length": float(len(trajectory.last.text))}
"""


def write_env(folder: Path, extra: str = "", name: str = "counting_env.py") -> Path:
    """An environment file; ``extra`` are further lines of its class."""
    path = folder / name
    path.write_text(COUNTING_ENV + extra, encoding="utf-8")
    return path

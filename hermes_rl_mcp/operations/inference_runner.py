"""``python -P -m hermes_rl_mcp.operations.inference_runner FOLDER``: carries out one inference test.

Detached from the server that started it, so that any server process can report on the test and none has to stay.
It runs the environment's own ``process`` command for each model, keeps ``state.json`` up to date, and ends every child
it started, also when it is itself told to end; if it is killed, the children see the end of their lifeline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import yaml
from pydantic import JsonValue

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.runs import ProcessName
from hermes_rl_mcp.contracts.settings import InferenceEndpoint
from hermes_rl_mcp.files import read_tail, write_atomic
from hermes_rl_mcp.interpreters import environment_program
from hermes_rl_mcp.operations.inference_records import (
    TestPaths,
    TestRequest,
    initial_state,
    read_groups,
    summarise,
    with_groups,
)
from hermes_rl_mcp.redact import SECRET_PREFIX, redact_text, secret_values
from hermes_rl_mcp.runs.process import MARKER, ManagedProcess, ProcessSpec, identity_of

log = logging.getLogger(__name__)

POLL_S = 0.25
TERM_S, KILL_S = 5.0, 5.0
SAMPLER_READY_S = 900.0
"""Upper bound; the model may have to be fetched first."""
_TAIL_BYTES = 1500


class ModelTestError(Exception):
    """One model could not be tested; the others still are."""


@dataclass(frozen=True)
class Endpoint:
    """Where one model's completions come from. ``api_key`` names a variable, as ``$NAME``."""

    base_url: str
    model_name: str
    server_type: str
    api_key: str


class Runner:
    """One test from its request to its last state."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._paths = TestPaths(folder)
        self._environ = dict(environ)
        self._request = TestRequest.model_validate_json(self._paths.request.read_bytes())
        self._state = initial_state(self._request, folder)
        self._state.runner = identity_of(os.getpid())
        self._children: list[ManagedProcess] = []

    async def run(self) -> None:
        """Never raises for a model that fails; its ``error`` says why."""
        self._save()
        try:
            for index, model in enumerate(self._request.models):
                await self._one(index, model)
            self._finish()
        except asyncio.CancelledError:
            self._state.result.status = "failed"
            self._state.result.message = "The test was ended from outside before it was done."
            raise
        finally:
            await self._end_children()
            self._save()

    async def _one(self, index: int, model: str) -> None:
        self._say(f"model {index + 1} of {len(self._request.models)}: {model}")
        with ExitStack() as files:
            try:
                remote = self._request.endpoint
                endpoint = await self._remote(remote, model, files) if remote else await self._serve(model, files)
                await self._process(index, endpoint, files)
            except ModelTestError as error:
                self._update(index, error=str(error))
            finally:
                await self._end_children()

    async def _remote(self, endpoint: InferenceEndpoint, model: str, files: ExitStack) -> Endpoint:
        if self._request.fetch_tokenizer_of:
            name, self._request.fetch_tokenizer_of = self._request.fetch_tokenizer_of, None
            fetch_log = self._paths.dir / "tokenizer.log"
            child = self._spawn("trainer", [sys.executable, "-P", "-m", "trainer.models", name], fetch_log, files)
            if await child.wait(SAMPLER_READY_S) != 0:
                raise ModelTestError(f"The tokenizer of {name} cannot be had: {_last_line(fetch_log)}")
            await self._end_children()
        return Endpoint(endpoint.base_url, model, "openai", f"${endpoint.api_key_variable}")

    async def _serve(self, model: str, files: ExitStack) -> Endpoint:
        """A sampler for this model on a port of our own: the socket is bound here, so no stranger can have it."""
        listener = files.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        nonce = secrets.token_hex(16)
        sampler_log = self._paths.of_model(self._request.info.name, model, "sampler.log")
        command = [sys.executable, "-P", "-m", "trainer.serve", "--model", model]
        command += ["--listen-fd", str(listener.fileno()), "--nonce", nonce, "--any-model-name"]
        child = self._spawn("trainer", command, sampler_log, files, (listener.fileno(),))
        deadline = time.monotonic() + SAMPLER_READY_S
        self._say(f"loading {model}")
        while not await asyncio.to_thread(_healthy, port, nonce):
            if child.poll() is not None:
                raise ModelTestError(
                    f"The sampler for {model} ended with code {child.exit_code}: {_last_line(sampler_log)} "
                    f"(log: {sampler_log})"
                )
            if time.monotonic() > deadline:
                raise ModelTestError(f"The sampler for {model} was not ready in time (log: {sampler_log})")
            await asyncio.sleep(POLL_S)
        return Endpoint(f"http://127.0.0.1:{port}/v1", model, "vllm", "x")

    async def _process(self, index: int, endpoint: Endpoint, files: ExitStack) -> None:
        deadline = time.monotonic() + self._request.model_timeout_s
        test = self._state.result.models_tested[index]
        output, process_log = Path(test.output_file), Path(test.log_file)
        config = process_log.with_suffix(".yaml")
        write_atomic(config, yaml.safe_dump(self._config(test.model, output, endpoint), sort_keys=False))
        info = self._request.info
        command = environment_program(info.base, self._environ)
        command += [f"{info.file_path}:{info.class_name}", "process", "--config", str(config)]
        child = self._spawn("env", command, process_log, files)
        while child.poll() is None:
            self._read(index, output)
            if time.monotonic() > deadline:
                raise ModelTestError(f"Process timed out after {self._request.model_timeout_s / 60:g} minutes")
            await asyncio.sleep(POLL_S)
        self._read(index, output)
        tail = redact_text(read_tail(process_log, _TAIL_BYTES), secret_values(os.environ))
        if child.exit_code != 0:
            self._update(index, stderr=tail)
            raise ModelTestError(f"Process exited with code {child.exit_code}: {_last_line(process_log)}")
        done = self._state.result.models_tested[index].steps_tested
        if done < self._request.num_steps:
            self._update(index, stderr=tail)
            raise ModelTestError(f"Only {done} of {self._request.num_steps} groups were scored")

    def _config(self, model: str, output: Path, endpoint: Endpoint) -> dict[str, JsonValue]:
        tokenizer = {"tokenizer_name": self._request.tokenizers[model]} if model in self._request.tokenizers else {}
        return {
            "env": {**self._request.env, **tokenizer, "data_path_to_save_groups": str(output)},
            "openai": [
                {
                    "model_name": endpoint.model_name,
                    "base_url": endpoint.base_url,
                    "api_key": endpoint.api_key,
                    "server_type": endpoint.server_type,
                    "health_check": False,
                }
            ],
        }

    def _spawn(
        self, name: ProcessName, command: list[str], log_file: Path, files: ExitStack, fds: tuple[int, ...] = ()
    ) -> ManagedProcess:
        reading, writing = os.pipe()
        files.callback(os.close, writing)
        environ = {**self._environ, MARKER: f"test-{self._request.test_id}", lifeline.VARIABLE: str(reading)}
        if name == "trainer":  # keys are for the environment
            endpoint = self._request.endpoint
            environ = {
                variable: value
                for variable, value in environ.items()
                if not variable.startswith(SECRET_PREFIX)
                and (endpoint is None or variable != endpoint.api_key_variable)
            }
        try:
            child = ManagedProcess.spawn(
                ProcessSpec(name, tuple(command), environ, log_file, self._paths.dir, (*fds, reading))
            )
        except OSError as error:
            raise ModelTestError(f"cannot start {command[3]}: {error}") from error
        finally:
            os.close(reading)
        self._children.append(child)
        return child

    async def _end_children(self) -> None:
        for child in reversed(self._children):
            if await child.stop(term_s=TERM_S, kill_s=KILL_S):
                child.reap()
            else:
                log.error("process %d does not end", child.identity.pid)
        self._children.clear()

    def _read(self, index: int, output: Path) -> None:
        before = self._state.result.models_tested[index]
        try:
            after = with_groups(before, read_groups(output))
        except ValueError as error:
            raise ModelTestError(str(error)) from error
        if after.steps_tested != before.steps_tested:
            self._state.result.models_tested[index] = after
            self._say(f"{after.model}: {after.steps_tested} of {self._request.num_steps} groups scored")

    def _update(self, index: int, **changes: str) -> None:
        tests = self._state.result.models_tested
        tests[index] = tests[index].model_copy(update=changes)
        self._save()

    def _finish(self) -> None:
        result = self._state.result
        result.summary = summarise(self._request, result.models_tested, self._paths.dir)
        result.status = "completed" if result.summary.models_succeeded else "failed"
        errors = [f"{test.model}: {test.error}" for test in result.models_tested if test.error]
        result.message = " ".join(errors) or "All groups were scored."

    def _say(self, message: str) -> None:
        self._state.result.message = message
        self._save()

    def _save(self) -> None:
        write_atomic(self._paths.state, self._state.model_dump_json(indent=1))


def _healthy(port: int, nonce: str) -> bool:
    """Whether our own sampler answers there with weights loaded. Proxies are left out."""
    try:
        with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            health = json.loads(reply.read())
    except (URLError, OSError, ValueError):
        return False
    return isinstance(health, dict) and health.get("nonce") == nonce and health.get("status") == "ok"


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in read_tail(path, _TAIL_BYTES).splitlines() if line.strip()]
    return redact_text(lines[-1], secret_values(os.environ))[:500] if lines else "no output"


async def _main(folder: Path) -> None:
    task = asyncio.ensure_future(Runner(folder, os.environ).run())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.warning("told to end")


def main() -> None:
    """The runner's process."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(_main(Path(sys.argv[1])))


if __name__ == "__main__":
    main()

"""``python -P -m hermes_rl_mcp.operations.inference_runner FOLDER``: carries out one inference test.

Detached from the server that started it, so that any server process can report on the test and none has to stay.
It runs the environment's own ``process`` command for each model, those behind an endpoint side by side and those served
here one after another, keeps ``state.json`` up to date, and ends every child
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
from hermes_rl_mcp.contracts.results import Verdict
from hermes_rl_mcp.contracts.runs import ProcessName
from hermes_rl_mcp.files import read_tail, write_atomic
from hermes_rl_mcp.interpreters import environment_program
from hermes_rl_mcp.operations.inference_figures import (
    overall,
    read_groups,
    summarise,
    verdict,
    with_groups,
    with_usage,
)
from hermes_rl_mcp.operations.inference_records import TestPaths, TestRequest, initial_state
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
        self._children: dict[int, list[ManagedProcess]] = {}
        """By index of the model; those of none are under -1."""
        self._device = asyncio.Lock()
        """One model at a time on this machine."""
        self._sizes: dict[int, int] = {}

    async def run(self) -> None:
        """Never raises for a model that fails; its ``error`` says why."""
        self._save()
        models = asyncio.ensure_future(self._models())
        asked = asyncio.ensure_future(self._asked_to_stop())
        try:
            await asyncio.wait({models, asked}, return_when=asyncio.FIRST_COMPLETED)
            if models.done():
                models.result()
                self._finish()
            else:
                await _cancelled(models)
                self._finish(stopped=True)
        except asyncio.CancelledError:
            self._state.result.status = "failed"
            self._state.result.message = "The test was ended from outside before it was done."
            raise
        finally:
            await _cancelled(models, asked)
            for index in list(self._children):
                await self._end_children(index)
            self._save()

    async def _models(self) -> None:
        problem = await self._fetch_tokenizer()
        async with asyncio.TaskGroup() as tasks:
            for index, model in enumerate(self._request.models):
                if problem and self._request.remote(model):
                    self._update(index, error=problem)
                else:
                    tasks.create_task(self._one(index, model))

    async def _asked_to_stop(self) -> None:
        while not self._paths.stop.exists():  # noqa: ASYNC110  (made by another process)
            await asyncio.sleep(POLL_S)

    async def _one(self, index: int, model: str) -> None:
        remote = self._request.remote(model)
        with ExitStack() as files:
            began = time.monotonic()
            try:
                if remote is not None:
                    self._say(f"asking {model}")
                    endpoint = Endpoint(remote.base_url, model, "openai", f"${remote.api_key_variable}")
                    await self._process(index, endpoint, files)
                else:
                    async with self._device:
                        began = time.monotonic()
                        await self._process(index, await self._serve(index, model, files), files)
                        await self._end_children(index)
            except ModelTestError as error:
                self._update(index, error=str(error))
            finally:
                await self._end_children(index)
                self._update(index, seconds=round(time.monotonic() - began, 1))
        self._update(index, verdict=verdict(self._request, self._state.result.models_tested[index]))

    async def _fetch_tokenizer(self) -> str | None:
        """Of what an endpoint's answers are cut into tokens with. Returns what went wrong."""
        name = self._request.fetch_tokenizer_of
        if name is None or not any(self._request.remote(model) for model in self._request.models):
            return None
        fetch_log = self._paths.dir / "tokenizer.log"
        with ExitStack() as files:
            try:
                command = [sys.executable, "-P", "-m", "trainer.models", name]
                child = self._spawn(-1, "trainer", command, fetch_log, files)
                if await child.wait(SAMPLER_READY_S) == 0:
                    return None
            except ModelTestError as error:
                return str(error)
            finally:
                await self._end_children(-1)
        return f"The tokenizer of {name} cannot be had: {_last_line(fetch_log)}"

    async def _serve(self, index: int, model: str, files: ExitStack) -> Endpoint:
        """A sampler for this model on a port of our own: the socket is bound here, so no stranger can have it."""
        listener = files.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        nonce = secrets.token_hex(16)
        sampler_log = self._paths.of_model(self._request.info.name, model, "sampler.log")
        command = [sys.executable, "-P", "-m", "trainer.serve", "--model", model]
        command += ["--listen-fd", str(listener.fileno()), "--nonce", nonce, "--any-model-name"]
        child = self._spawn(index, "trainer", command, sampler_log, files, (listener.fileno(),))
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
        child = self._spawn(index, "env", command, process_log, files)
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
        self,
        index: int,
        name: ProcessName,
        command: list[str],
        log_file: Path,
        files: ExitStack,
        fds: tuple[int, ...] = (),
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
        self._children.setdefault(index, []).append(child)
        return child

    async def _end_children(self, index: int) -> None:
        for child in reversed(self._children.pop(index, [])):
            if await child.stop(term_s=TERM_S, kill_s=KILL_S):
                child.reap()
            else:
                log.error("process %d does not end", child.identity.pid)

    def _read(self, index: int, output: Path) -> None:
        bytes_now = output.stat().st_size if output.exists() else 0
        if bytes_now == self._sizes.get(index, 0):
            return
        self._sizes[index] = bytes_now
        before = self._state.result.models_tested[index]
        try:
            after = with_groups(self._request, before, read_groups(output))
        except ValueError as error:
            raise ModelTestError(str(error)) from error
        if after.steps_tested != before.steps_tested:
            self._state.result.models_tested[index] = after
            self._say(f"{after.model}: {after.steps_tested} of {self._request.num_steps} groups scored")

    def _update(self, index: int, **changes: str | float | Verdict) -> None:
        tests = self._state.result.models_tested
        tests[index] = tests[index].model_copy(update=changes)
        self._save()

    def _finish(self, *, stopped: bool = False) -> None:
        result = self._state.result
        if stopped:
            for index, test in enumerate(result.models_tested):
                if test.verdict is None:
                    self._update(index, error="The test was stopped before this model was through.")
        tests = [
            with_usage(test, Path(test.output_file), self._request.host(test.model)) for test in result.models_tested
        ]
        result.models_tested = [test.model_copy(update={"verdict": verdict(self._request, test)}) for test in tests]
        result.verdict = overall(self._request, result.models_tested)
        result.summary = summarise(self._request, result.models_tested, self._paths.dir)
        result.status = "completed" if result.summary.models_succeeded else "failed"
        errors = [f"{test.model}: {test.error}" for test in result.models_tested if test.error]
        result.message = " ".join(errors) or "All groups were scored."
        if stopped:
            result.status = "stopped"
            result.message = "The test was stopped with rl_stop_training; what it had is shown."

    def _say(self, message: str) -> None:
        self._state.result.message = message
        self._save()

    def _save(self) -> None:
        write_atomic(self._paths.state, self._state.model_dump_json(indent=1))


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    """Ends tasks and waits until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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

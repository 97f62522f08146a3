"""The evaluation of a run's end again, for any run with an adapter: other items, seeds or checkpoints.

The sampler and the environment's own ``compare`` command run as children, in a folder that goes away with them; the run
is not touched. Invariant: both are gone when this returns, also when it is cancelled or one of them hangs.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import httpx
import yaml
from pydantic import ValidationError

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.records import Evaluation
from hermes_rl_mcp.contracts.runs import ProcessName, RunRequest
from hermes_rl_mcp.contracts.sampling_api import SamplingHealth
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, PreflightError
from hermes_rl_mcp.files import read_file, write_atomic
from hermes_rl_mcp.operations import evaluation
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.paths import RunPaths
from hermes_rl_mcp.runs.outcome import last_line
from hermes_rl_mcp.runs.process import ManagedProcess, ProcessSpec

READY_S = 900.0
"""For the sampler; a large model loads for minutes."""
POLL_S = 0.2
TERM_S, KILL_S = 5.0, 5.0
_AGAIN = "The run is as it was: mend what is said, then call again."

Say = Callable[[str], None]


class ComparisonError(HermesRLError):
    """The evaluation could not be carried out."""


async def compare(context: Context, run_id: str, items: int, seed: int, step: int | None, say: Say) -> Evaluation:
    """Base against the adapter of ``step`` (the last checkpoint without it). ``say`` is told how far it is.

    Raises UnknownRunError, InvalidValueError, PreflightError or ComparisonError.
    """
    request = (await RunReader.open(context, run_id)).request()
    if request is None or request.env_base != "hermes_rl_mcp":
        raise PreflightError(
            f"Run {run_id} cannot be evaluated: its environment is not of this library's kind, or its request is gone.",
            hint="Ask base and adapter yourself: hermes-rl serve RUN.",
        )
    steps = [marked.marker.step for marked in context.runs.checkpoints(run_id)]
    if step is not None and not request.trainer.checkpoint_dir and step not in steps:
        raise InvalidValueError(
            f"Run {run_id} has no complete checkpoint of step {step}.",
            hint=f"There are checkpoints of step {', '.join(map(str, steps))}." if steps else "It has none at all.",
        )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hermes-rl-evaluate-")))
        children = _Children(context, folder, stack)
        say("loading the model")
        address = await children.serve(context.home.run(run_id).dir, step)
        values = {**request.env, "tokenizer_name": request.tokenizer_name, "eval_items": items}
        server = {"model_name": request.model_path, "base_url": f"{address}/v1", "server_type": request.server_type}
        write_atomic(folder / "config.yaml", yaml.safe_dump({"env": values, "openai": [server]}, sort_keys=False))
        return await children.compare(request, seed, say)


class _Children:
    """The two processes of one comparison."""

    def __init__(self, context: Context, folder: Path, stack: AsyncExitStack) -> None:
        self._context = context
        self._folder = folder
        self._stack = stack
        self._prefix = "r" + secrets.token_hex(16)
        self._nonce = secrets.token_hex(16)

    async def serve(self, run_dir: Path, step: int | None) -> str:
        """The sampler's address, once it answers as ours."""
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{self._prefix}"
        fd = listener.fileno()
        command = ["trainer.serve", "--run", str(run_dir), "--listen-fd", str(fd)]
        command += ["--nonce", self._nonce, "--path-prefix", self._prefix]
        command += ["--step", str(step)] if step is not None else []
        child = self._spawn("trainer", command, (fd,))
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:

            async def answers() -> bool:
                try:
                    health = SamplingHealth.model_validate_json((await http.get(f"{address}/health")).content)
                except (httpx.HTTPError, ValidationError):
                    return False
                return health.nonce == self._nonce and health.status == "ok"

            await self._until(child, answers, READY_S)
        return address

    async def compare(self, request: RunRequest, seed: int, say: Say) -> Evaluation:
        paths = RunPaths(self._folder)
        config = str(self._folder / "config.yaml")
        spec = f"{request.env_file}:{request.env_class}"
        child = self._spawn("env", ["hermes_rl_mcp.envs", spec, "compare", "--config", config, "--seed", str(seed)])

        async def ended() -> bool:
            if progress := evaluation.progress(paths):
                say(progress)
            return child.poll() == 0

        await self._until(child, ended, None)
        return Evaluation.model_validate_json(read_file(paths.evaluation))

    async def _until(self, child: ManagedProcess, holds: Callable[[], Awaitable[bool]], limit_s: float | None) -> None:
        began = time.monotonic()
        while not await holds():
            if child.poll() is not None:
                raise ComparisonError(
                    f"{child.spec.name} ended with code {child.exit_code}: {self._words(child)}", hint=_AGAIN
                )
            if limit_s is not None and time.monotonic() - began > limit_s:
                raise ComparisonError(
                    f"{child.spec.name} was not ready after {limit_s:.0f} s: {self._words(child)}", hint=_AGAIN
                )
            await anyio.sleep(POLL_S)

    def _words(self, child: ManagedProcess) -> str:
        return last_line(child.spec.log, [self._nonce, self._prefix]) or "it said nothing"

    def _spawn(self, name: ProcessName, module: list[str], fds: tuple[int, ...] = ()) -> ManagedProcess:
        reading, writing = os.pipe()
        self._stack.callback(os.close, writing)
        environ = helper_environ(self._context.home, self._context.operator.environ)
        command = (sys.executable, "-P", "-m", *module)
        log = self._folder / f"{name}.log"
        try:
            child = ManagedProcess.spawn(
                ProcessSpec(
                    name, command, {**environ, lifeline.VARIABLE: str(reading)}, log, self._folder, (*fds, reading)
                )
            )
        finally:
            os.close(reading)
        self._stack.push_async_callback(_end, child)
        return child


async def _end(child: ManagedProcess) -> None:
    with anyio.CancelScope(shield=True):
        if await child.stop(term_s=TERM_S, kill_s=KILL_S):
            child.reap()

"""The commands of an environment file: serve, process, evaluate, compare, describe, check.

Invariant: standard output carries a description and nothing else; whatever an environment prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hermes_rl_mcp import lifeline
from hermes_rl_mcp.contracts.vitals import EnvState
from hermes_rl_mcp.envs.base import BaseEnv
from hermes_rl_mcp.envs.checking import check
from hermes_rl_mcp.envs.describe import describe, validate
from hermes_rl_mcp.envs.evaluate import run_evaluation, table, write_config
from hermes_rl_mcp.envs.held_loop import HeldLoop
from hermes_rl_mcp.envs.held_out import HeldOut
from hermes_rl_mcp.envs.hook_rules import check_hooks, place
from hermes_rl_mcp.envs.loading import load_environment
from hermes_rl_mcp.envs.options import Flags, Options, parse_flags, resolve
from hermes_rl_mcp.envs.places import place_of_error
from hermes_rl_mcp.envs.process import FORCED, Processor, check_total
from hermes_rl_mcp.envs.reports import STATE_S, MetricLines, StateFile, write_failure
from hermes_rl_mcp.envs.rollout_client import RolloutClient
from hermes_rl_mcp.envs.saying import ShortTracebacks, cut, said, shown, traceback_of
from hermes_rl_mcp.envs.serve import Worker
from hermes_rl_mcp.errors import EnvironmentFileError, HermesRLError, InvalidValueError
from hermes_rl_mcp.files import now

log = logging.getLogger(__name__)

PROCESS_RECONNECT_S = 20.0
"""In front of a person or a tool that waits, an endpoint that is not there is an answer, not a reason to wait long."""

CLEANUP_S = 30.0
"""How long an environment may take to clean up."""
_LAST_LINE_CHARS = 3000

USAGE = (
    "usage: python -m hermes_rl_mcp.envs FILE.py[:Class] {serve|process|evaluate|compare|describe|check} "
    "[--config FILE.yaml] [--env.FIELD VALUE] [--openai.FIELD VALUE]"
)


def main(arguments: Sequence[str], environment: type[BaseEnv] | None = None) -> NoReturn:
    """With ``environment`` None the first argument names the file. Exits 0, or 1 after saying why."""
    output = _reserve_stdout()
    _log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if {"-h", "--help"} & set(arguments) or not arguments:
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if arguments else 1)
    lifeline.watch(os.environ)
    run_dir = _run_dir(arguments)
    chosen, file = environment, ""
    try:
        words = list(arguments)
        spec = "" if environment else words.pop(0)
        file = file_of(environment, spec)
        flags = parse_flags(words)
        chosen = environment or load_environment(spec)
        check_hooks(chosen, flags.command)
        _COMMANDS[flags.command](chosen, flags, output)
    except OrderToStop:
        raise SystemExit(0) from None
    except HermesRLError as error:
        _say(run_dir, error)
    except SystemExit as error:
        left = EnvironmentFileError(
            f"The environment's own code ended its process: sys.exit({error.code!r}).",
            hint="Raise an exception instead: it is reported with its message.",
        )
        sys.stderr.write(traceback_of(error))
        _say(run_dir, left, place_of_error(error, file))
    except KeyboardInterrupt as error:
        sys.stderr.write(traceback_of(error))
        _say(run_dir, error, place_of_error(error, file), code=130)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - user code; an end of a task that nobody ordered, too
        sys.stderr.write(traceback_of(error))
        _say(run_dir, error, place_of_error(error, file) or (place(chosen) if chosen else file))
    raise SystemExit(0)


class OrderToStop(SystemExit):
    """SIGTERM before the loop runs; an ``sys.exit(0)`` of user code is none."""


def file_of(environment: type[BaseEnv] | None, spec: str) -> str:
    """The environment's file, as its frames name it."""
    if environment is not None:
        return str(getattr(sys.modules.get(environment.__module__), "__file__", None) or "")
    path = spec if Path(spec).is_file() else spec.rpartition(":")[0] or spec
    return str(Path(path).expanduser().absolute())


def _say(run_dir: Path | None, error: BaseException, where: str = "", code: int = 1) -> NoReturn:
    """The last line, and the report of a run; ends the process."""
    _report(run_dir, error, where)
    text = f"{type(error).__name__}: {cut(str(error), _LAST_LINE_CHARS)}" if isinstance(error, HermesRLError) else ""
    text = text or said(error)
    sys.stderr.write(f"{text} ({where})\n" if where and where not in text else f"{text}\n")
    raise SystemExit(code) from None


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortTracebacks("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _describe(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    if values_path := flags.plain.get("values"):
        text = validate(environment, _values_in(values_path)).model_dump_json(indent=1)
    else:
        text = describe(environment).model_dump_json(indent=1)
    if target := flags.plain.get("output"):
        try:
            Path(target).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidValueError(f"--output {target} cannot be written: {error.strerror}.") from error
    else:
        os.write(output, f"{text}\n".encode())


def _values_in(path: str) -> dict[str, Any]:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValueError(f"--values {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidValueError(f"--values {path} is not JSON: {error}.") from error
    if not isinstance(given, dict):
        raise InvalidValueError(f"--values {path} must hold a JSON object of fields; found {shown(given)}.")
    return given


def _process(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    options = resolve(environment, flags, FORCED)
    check_total(options.config)

    async def run(env: BaseEnv) -> None:
        env.server.reconnect_s = PROCESS_RECONNECT_S
        path = await Processor(env).run()
        log.info("groups are in %s, to read them open %s", path, path.with_suffix(".html"))

    asyncio.run(_with(environment, options, run))


def _evaluate(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    options = resolve(environment, flags, {"use_wandb": False})
    write_config(options.config, options.servers)

    async def run(env: BaseEnv) -> None:
        env.server.reconnect_s = PROCESS_RECONNECT_S
        report = await run_evaluation(env)
        sys.stderr.write(table(report.metrics) + "\n")

    asyncio.run(_with(environment, options, run))


def _compare(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    """Base against adapter at one endpoint that serves both; the result lies beside the config file."""
    options = resolve(environment, flags, {"use_wandb": False})
    seed = flags.plain.get("seed", "0")
    if "config" not in flags.plain or not seed.isdecimal():
        raise InvalidValueError("compare needs --config FILE.yaml, and --seed is a whole number from 0 on.")
    folder = Path(flags.plain["config"]).expanduser().absolute().parent
    if options.config.eval_items < 1:
        raise InvalidValueError("compare needs to be told how many items.", hint="Set --env.eval_items 100.")

    async def run(env: BaseEnv) -> None:
        env.server.reconnect_s = PROCESS_RECONNECT_S
        held_out, state = HeldOut(env, folder, seed=int(seed)), StateFile(folder)
        await held_out.plan(total_steps=0, batch_size=0)
        if not held_out.planned:
            return
        running = asyncio.create_task(held_out.run())
        while not running.done():
            await asyncio.wait({running}, timeout=STATE_S)
            state.offer(EnvState(time=now(), evaluating=held_out.progress))

    asyncio.run(_with(environment, options, run))


def _serve(environment: type[BaseEnv], flags: Flags, output: int) -> None:
    # Until the loop runs, an order to stop is simply obeyed.
    signal.signal(signal.SIGTERM, _stop_at_once)
    options = resolve(environment, flags)
    for server in options.servers:
        if server.server_type not in ("vllm", "sglang"):
            raise InvalidValueError(
                f"server_type {server.server_type} gives no token ids and logprobs; training needs them.",
                hint="Set openai.server_type to vllm or sglang, or use the process or evaluate command.",
            )

    async def run(env: BaseEnv) -> None:
        metrics = MetricLines(options.run_dir)
        env.on_metrics(lambda values: metrics.write(env.curr_step, values))
        api = RolloutClient(options.config.rollout_server_url)
        secrets = _secrets(options)
        held_out = HeldOut(env, options.run_dir, secrets) if options.run_dir else None
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            await Worker(env, api, metrics, StateFile(options.run_dir, secrets), held_out).run(stop)
        finally:
            await api.close()

    asyncio.run(_with(environment, options, run))


def _stop_at_once(*_: object) -> NoReturn:
    raise OrderToStop(0)


def _secrets(options: Options) -> list[str]:
    """What must not be told of the run's address."""
    return [options.run.nonce, options.run.path_prefix] if options.run else []


async def _with(environment: type[BaseEnv], options: Options, run: Callable[[BaseEnv], Any]) -> None:
    """Sets the environment up, runs, cleans up in any case."""
    env = environment(options.config, options.servers, options.slurm, options.testing)
    env.run_dir = options.run_dir
    try:
        async with HeldLoop(file_of(environment, "")):
            await env.setup()
            await asyncio.to_thread(lambda: env.tokenizer)  # if it cannot be loaded, nothing is registered or sampled
            await run(env)
    finally:
        try:
            async with asyncio.timeout(CLEANUP_S):
                await env.cleanup()
        except Exception as error:
            # User code. What was made is made, and an error before it is the one to tell of.
            log.warning("cleanup failed (%s): %s", place(environment, "cleanup"), said(error), exc_info=error)
        finally:
            await env.server.close()


def _report(run_dir: Path | None, error: BaseException, where: str) -> None:
    if run_dir is None:
        return
    try:
        write_failure(run_dir, error, where)
    except OSError as problem:
        log.warning("the report of this failure could not be written: %s", problem)


def _run_dir(arguments: Sequence[str]) -> Path | None:
    """Where a failure is reported, known even if nothing else can be read."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        value = following if word == "--config" else word.removeprefix("--config=") if "--config=" in word else ""
        if value and "serve" in arguments:
            try:
                document = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError):
                return None
            return Path(value).absolute().parent if isinstance(document, dict) and "run" in document else None
    return None


def _reserve_stdout() -> int:
    """A descriptor of the real standard output; number 1 itself becomes stderr, also for C code."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    return output


_COMMANDS: dict[str, Callable[[type[BaseEnv], Flags, int], None]] = {
    "serve": _serve,
    "process": _process,
    "evaluate": _evaluate,
    "compare": _compare,
    "describe": _describe,
    "check": check,
}

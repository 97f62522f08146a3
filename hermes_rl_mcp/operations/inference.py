"""rl_test_inference: start a test of the selected environment against real models, and ask how it is going.

The work is done by a detached runner (inference_runner.py); this call only waits for it, within what MCP clients allow.
"""

from __future__ import annotations

import math
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from pydantic import JsonValue, ValidationError

from hermes_rl_mcp.contracts.results import TestInference
from hermes_rl_mcp.errors import HermesRLError, InvalidValueError, NotFoundError
from hermes_rl_mcp.files import make_private_dir, private, read_file, write_atomic
from hermes_rl_mcp.operations.children import helper_environ
from hermes_rl_mcp.operations.context import MAX_WAIT_S, PROGRESS_S, Context, Progress, no_progress
from hermes_rl_mcp.operations.environments import Selected, selected
from hermes_rl_mcp.operations.fitting import size, sliced
from hermes_rl_mcp.operations.inference_records import TEST_ID, TestPaths, TestRequest, TestState, initial_state
from hermes_rl_mcp.runs.configuration.checks import check_model
from hermes_rl_mcp.runs.process import is_alive
from hermes_rl_mcp.runs.request import BUILTIN, env_values, model_path

MODEL_TIMEOUT_S = 600.0
"""Per model once it is loaded, as in the original."""
TIMEOUT_VARIABLE = "HERMES_RL_INFERENCE_TIMEOUT_S"
"""The operator's own."""
_POLL_S = 0.25
_READ_RESERVE_S = 2.5
"""Kept for reading and answering."""
_GROUPS_CHARS = 10_000
"""Of all groups in one answer; logs and errors of up to eight models come besides."""
_ERROR_CHARS = 2_400
"""Of errors, and again of last lines of logs, of all models together."""
_FIGURES_CHARS = 900
"""Of a model, besides its groups and examples."""
_LEAST_GROUPS_CHARS = 2_000
_RUNNER_START_S = 30.0
"""A runner that has not said who it is by then never started."""


async def test_inference(
    context: Context,
    num_steps: int = 3,
    group_size: int = 16,
    models: Sequence[str] | None = None,
    test_id: str | None = None,
    wait_seconds: float = 45.0,
    progress: Progress = no_progress,
    offset: int = 0,
) -> TestInference:
    """With ``test_id`` it reports on that test, else it starts a new one; then waits for its end, but not for long.

    Groups of each model are shown from ``offset`` on, as many as fit.
    """
    began = time.monotonic()
    paths = TestPaths(_folder(context, test_id)) if test_id else await _start(context, num_steps, group_size, models)
    deadline = began + min(max(wait_seconds, 0.0), MAX_WAIT_S - _READ_RESERVE_S)  # the start counts as waiting
    next_note = time.monotonic()
    while True:
        state = await anyio.to_thread.run_sync(_read, context, paths)
        left_s = deadline - time.monotonic()
        if state.result.status != "running" or left_s <= 0:
            return _page(_with_hint(state.result), offset)
        if time.monotonic() >= next_note:
            next_note = time.monotonic() + PROGRESS_S
            done = sum(test.total_completions for test in state.result.models_tested)
            await progress(float(done), float(state.result.test_config.total_rollouts), state.result.message)
        await anyio.sleep(min(_POLL_S, left_s))


test_inference.__test__ = False  # type: ignore[attr-defined]  # not a pytest function


async def _start(context: Context, num_steps: int, group_size: int, models: Sequence[str] | None) -> TestPaths:
    now = await selected(context)
    endpoint = context.settings.inference
    chosen = _models(context, now, models)
    if num_steps < 1 or group_size < 1:
        raise InvalidValueError("num_steps and group_size must be at least 1.", hint="Leave them out for 3 and 16.")
    if not all(model.startswith(BUILTIN) for model in chosen):
        _check_key(context)
    test_id = secrets.token_hex(4)
    paths = TestPaths(context.home.inference_tests / test_id)
    request = TestRequest(
        test_id=test_id,
        info=now.info,
        models=chosen,
        num_steps=num_steps,
        group_size=group_size,
        env=_env(context, now, num_steps, group_size),
        tokenizers=_tokenizers(context, now, chosen),
        endpoint=endpoint,
        fetch_tokenizer_of=_builtin(now) if endpoint else None,
        trained_model=now.resolution.model_name,
        model_timeout_s=_timeout_s(context),
        created_at=context.now().isoformat(timespec="milliseconds"),
    )
    await _check(context, now, request)
    make_private_dir(paths.dir)
    write_atomic(paths.request, request.model_dump_json(indent=1))
    write_atomic(paths.state, initial_state(request, paths.dir).model_dump_json(indent=1))
    _spawn(context, paths, request)
    return paths


def _timeout_s(context: Context) -> float:
    text = context.operator.environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        value = float(text) if text else MODEL_TIMEOUT_S
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidValueError(f"{TIMEOUT_VARIABLE}={text!r} is not a number of seconds above 0.", hint="Unset it.")
    return value


async def stop_test(context: Context, test_id: str) -> str | None:
    """Asks a test to end and returns its status; None if there is no such test. What it has so far is kept."""
    if not TEST_ID.match(test_id) or not (context.home.inference_tests / test_id).is_dir():
        return None
    paths = TestPaths(context.home.inference_tests / test_id)
    state = await anyio.to_thread.run_sync(_read, context, paths)
    if state.result.status != "running":
        return state.result.status
    await anyio.to_thread.run_sync(write_atomic, paths.stop, "")
    return "stopping"


def _check_key(context: Context) -> None:
    endpoint = context.settings.inference
    if endpoint is None or context.operator.environ.get(endpoint.api_key_variable):
        return
    if urlsplit(endpoint.base_url).hostname in ("127.0.0.1", "localhost", "::1"):
        return  # servers on this machine seldom want one
    raise HermesRLError(
        f"There is no key for {endpoint.base_url}: {endpoint.api_key_variable} is not set.",
        hint=f"The person who runs the server can set it: hermes-rl config set {endpoint.api_key_variable} ...",
    )


def _models(context: Context, now: Selected, models: Sequence[str] | None) -> list[str]:
    endpoint = context.settings.inference
    if models is not None and not models:
        raise InvalidValueError("models is an empty list.", hint="Leave it out to test the configured model.")
    usual = [endpoint.model_name, *endpoint.further_models] if endpoint else [now.resolution.model_name]
    chosen = list(dict.fromkeys(models or usual))
    for model in chosen:
        if endpoint is None or model.startswith(BUILTIN):
            check_model(context.settings.profile, model)
    return chosen


def _env(context: Context, now: Selected, num_steps: int, group_size: int) -> dict[str, JsonValue]:
    """What a run would use, but for the size of the test. All groups are kept: equal scores are a finding."""
    values = env_values(now.resolution, context.home, f"test_inference_{now.info.name}")
    changes: Mapping[str, JsonValue] = {
        "total_steps": num_steps,
        "group_size": group_size,
        "batch_size": group_size,
        "use_wandb": False,
        "ensure_scores_are_not_same": False,
        "include_messages": True,
    }
    return values | {name: value for name, value in changes.items() if name in now.resolution.fields}


def _tokenizers(context: Context, now: Selected, models: Sequence[str]) -> dict[str, str]:
    """For models served here. A model behind an endpoint is measured with the tokenizer of the configured one."""
    field = now.resolution.fields.get("tokenizer_name")
    if field is None or not field.managed:
        return {}
    here = context.settings.inference is None
    return {model: model_path(context.home, model) for model in models if here or model.startswith(BUILTIN)}


def _builtin(now: Selected) -> str | None:
    return now.resolution.model_name if now.resolution.model_name.startswith(BUILTIN) else None


async def _check(context: Context, now: Selected, request: TestRequest) -> None:
    reply = await context.describer.validate(now.info, request.env)
    if not reply.ok:
        reasons = "; ".join(f"{name}: {text}" for name, text in reply.errors.items())
        raise InvalidValueError(
            f"The environment '{now.info.name}' refuses its configuration: {reasons}.",
            hint="Change the field with rl_edit_config, or choose another group_size.",
        )


def _spawn(context: Context, paths: TestPaths, request: TestRequest) -> None:
    """In a session of its own: it neither dies with this server nor holds its pipes."""
    environ = helper_environ(context.home, context.operator.environ)
    if request.endpoint is not None:
        variable = request.endpoint.api_key_variable
        environ[variable] = context.operator.environ.get(variable) or "x"
    command = [sys.executable, "-P", "-m", "hermes_rl_mcp.operations.inference_runner", str(paths.dir)]
    with open(paths.runner_log, "ab", opener=private) as log:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=paths.dir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, name="reap inference runner", daemon=True).start()


def _folder(context: Context, test_id: str) -> Path:
    folder = context.home.inference_tests / test_id
    if not TEST_ID.match(test_id) or not folder.is_dir():
        known = sorted(context.home.inference_tests.glob("*/state.json"), key=lambda p: p.stat().st_mtime, reverse=True)
        raise NotFoundError(
            f"Inference test '{test_id}' not found.",
            hint="Call rl_test_inference without test_id to start one.",
            details={"available": [path.parent.name for path in known[:10]]},
        )
    return folder


def _read(context: Context, paths: TestPaths) -> TestState:
    try:
        state = TestState.model_validate_json(read_file(paths.state))
    except (OSError, ValidationError) as error:
        raise HermesRLError(
            f"The state of the inference test in {paths.dir} cannot be read: {error}.",
            hint="Start another with rl_test_inference.",
        ) from error
    if state.result.status != "running":
        return state
    if state.runner is None:
        gone = context.clock() - paths.state.stat().st_mtime > _RUNNER_START_S
    else:
        gone = not is_alive(state.runner)
    if gone:
        state = TestState.model_validate_json(read_file(paths.state))  # it may have finished in between
        if state.result.status == "running":
            state.result.status = "failed"
            state.result.message = f"The test's process is gone without a result; see {paths.runner_log}."
    return state


def _with_hint(result: TestInference) -> TestInference:
    if result.status != "running":
        return result
    text = f"Still running: {result.message}. Call rl_test_inference(test_id='{result.test_id}') to go on waiting."
    return result.model_copy(update={"message": text})


def _page(result: TestInference, offset: int) -> TestInference:
    """The same groups of every model, so that one offset goes on with all of them."""
    tests = result.models_tested
    most = max((len(test.steps) for test in tests), default=0)
    sizes = [
        sum(size(test.steps[i].model_dump(mode="json")) for test in tests if i < len(test.steps)) for i in range(most)
    ]
    examples = sum(size(one.model_dump(mode="json")) for test in tests for one in test.examples)
    left = _GROUPS_CHARS - examples - _FIGURES_CHARS * len(tests)
    page = sliced(sizes, offset, 0, max(left, _LEAST_GROUPS_CHARS))
    most = _ERROR_CHARS // max(len(tests), 1)
    shown = [
        test.model_copy(
            update={
                "steps": test.steps[page.first : page.last],
                "error": test.error and test.error[:most],
                "stderr": test.stderr and test.stderr[-most:],
            }
        )
        for test in tests
    ]
    return result.model_copy(
        update={
            "models_tested": shown,
            "truncated": page.next_offset is not None,
            "next_offset": page.next_offset,
        }
    )

"""What can be read without calling a tool: environment sources, and a run's files, with secrets masked.

Windows of logs are in bytes. Text of an environment or a model is returned as it is: data, not instructions.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import mcp.types as t
import yaml
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError

from hermes_rl_mcp.catalog.scan import find
from hermes_rl_mcp.contracts.runs import RunRecord
from hermes_rl_mcp.errors import HermesRLError, NotFoundError
from hermes_rl_mcp.operations.environments import catalog
from hermes_rl_mcp.operations.operations import Operations
from hermes_rl_mcp.operations.reading import RunReader
from hermes_rl_mcp.paths import PROCESS_LOGS
from hermes_rl_mcp.redact import redact, redact_text

MAX_WINDOW_BYTES = 262_144
LISTED_RUNS = 20
_YAML, _JSON, _PYTHON, _TEXT = "application/yaml", "application/json", "text/x-python", "text/plain"


def register(server: MCPServer[Any], operations: Operations) -> None:
    """Adds the resource templates to ``server``."""
    context = operations.context

    @server.resource("rl://environments/{name}/source", title="Source of an environment", mime_type=_PYTHON)
    async def environment_source(name: str) -> str:
        """The Python file of one environment."""
        with _as_resource_errors():
            info = find((await catalog(context)).environments, name)
            return await anyio.to_thread.run_sync(_text, Path(info.file_path))

    @server.resource("rl://runs/{run_id}/config", title="Configuration of a run", mime_type=_YAML)
    async def run_config(run_id: str) -> str:
        """config.yaml of one run, secrets masked; before it has ports, what it was asked for."""
        with _as_resource_errors():
            await RunReader.open(context, run_id)
            return await anyio.to_thread.run_sync(_config, operations, run_id)

    @server.resource("rl://runs/{run_id}/state", title="State of a run", mime_type=_JSON)
    async def run_state(run_id: str) -> str:
        """The run's record: state, processes, ports, times."""
        with _as_resource_errors():
            return (await RunReader.open(context, run_id)).record.model_dump_json(indent=1)

    @server.resource("rl://runs/{run_id}/metrics", title="Metrics of a run", mime_type=_JSON)
    async def run_metrics(run_id: str) -> str:
        """All steps, one object each, oldest first."""
        with _as_resource_errors():
            reader = await RunReader.open(context, run_id)
            return json.dumps(await anyio.to_thread.run_sync(reader.metrics))

    @server.resource(
        "rl://runs/{run_id}/logs/{process}{?offset,limit}", title="Log of a run's process", mime_type=_TEXT
    )
    async def run_log(run_id: str, process: str, offset: int = -1, limit: int = 16_384) -> str:
        """A window in bytes of the api, trainer, env or supervisor log; without offset its end."""
        with _as_resource_errors():
            await RunReader.open(context, run_id)
            if process not in PROCESS_LOGS:
                raise ResourceNotFoundError(f"No log '{process}'. There are: {', '.join(PROCESS_LOGS)}.")
            if not 0 < limit <= MAX_WINDOW_BYTES:
                raise ResourceError(f"limit must be 1 to {MAX_WINDOW_BYTES} bytes.")
            path = context.home.log(process, run_id)
            secrets = _secrets(operations, run_id)
            return redact_text(await anyio.to_thread.run_sync(_window, path, offset, limit, secrets))


async def current(operations: Operations) -> list[t.Resource]:
    """Environment sources and the newest runs, for clients that list rather than fill templates."""
    context = operations.context
    found = [
        t.Resource(
            uri=f"rl://environments/{info.name}/source",
            name=f"{info.stem}.py",
            title=f"Source of environment {info.name}",
            mime_type=_PYTHON,
        )
        for info in (await catalog(context)).environments
    ]
    runs = await anyio.to_thread.run_sync(context.runs.list)
    for run in [run for run in runs if isinstance(run, RunRecord)][:LISTED_RUNS]:
        for part, mime_type in (("state", _JSON), ("metrics", _JSON), ("config", _YAML)):
            found.append(
                t.Resource(
                    uri=f"rl://runs/{run.run_id}/{part}",
                    name=f"{run.run_id}-{part}",
                    title=f"{part.title()} of run {run.run_id} ({run.environment}, {run.status.value})",
                    mime_type=mime_type,
                )
            )
    return found


@contextmanager
def _as_resource_errors() -> Iterator[None]:
    """Errors of ours in the SDK's terms."""
    try:
        yield
    except NotFoundError as error:
        raise ResourceNotFoundError(str(error)) from error
    except HermesRLError as error:
        raise ResourceError(str(error)) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ResourceNotFoundError(f"{path} cannot be read: {error.strerror}") from error


def _config(operations: Operations, run_id: str) -> str:
    paths = operations.context.home.run(run_id)
    path = paths.config if paths.config.is_file() else paths.request
    loaded = yaml.safe_load(_text(path))
    return yaml.safe_dump(redact(loaded, _secrets(operations, run_id)), sort_keys=False, allow_unicode=True)


def _secrets(operations: Operations, run_id: str) -> list[str]:
    """The run's nonce and path prefix, which also occur inside of addresses."""
    try:
        loaded = yaml.safe_load(operations.context.home.run(run_id).config.read_text(encoding="utf-8"))
        section = loaded["run"]
        return [str(section[name]) for name in ("nonce", "path_prefix") if section.get(name)]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []


def _window(path: Path, offset: int, limit: int, secrets: list[str]) -> str:
    """The run's secrets are masked before the window is cut, byte for byte, so that two windows together show none."""
    margin = max((len(secret.encode()) for secret in secrets), default=0)
    try:
        with path.open("rb") as file:
            begin = max(0, path.stat().st_size - limit) if offset < 0 else offset
            first = max(0, begin - margin)
            file.seek(first)
            data = file.read(begin - first + limit + margin)
    except FileNotFoundError:
        return ""
    for secret in secrets:
        data = data.replace(secret.encode(), b"*" * len(secret.encode()))
    return data[begin - first :][:limit].decode("utf-8", "replace")

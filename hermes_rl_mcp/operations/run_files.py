"""A run's configuration and its record as they may be shown: without secrets, hidden characters escaped."""

from __future__ import annotations

from typing import Any

import anyio.to_thread
import yaml

from hermes_rl_mcp.errors import NotFoundError
from hermes_rl_mcp.files import read_file
from hermes_rl_mcp.operations.context import Context
from hermes_rl_mcp.operations.reading import RunReader, known_secrets
from hermes_rl_mcp.redact import redact
from hermes_rl_mcp.untrusted import shown_values

_SAID_CHARS = 200
"""Of a parser's complaint, which quotes the file."""


async def shown_config(context: Context, reader: RunReader) -> Any:
    """``config.yaml``; before the run has ports, what was asked for. Raises NotFoundError."""
    return await anyio.to_thread.run_sync(read_config, context, reader)


def read_config(context: Context, reader: RunReader) -> Any:
    """The same without an event loop."""
    run_id = reader.record.run_id
    paths = context.home.run(run_id)
    path = paths.config if paths.config.is_file() else paths.request
    try:
        loaded = yaml.safe_load(read_file(path))
    except (OSError, yaml.YAMLError) as error:
        raise NotFoundError(
            f"{path} cannot be read: {str(error)[:_SAID_CHARS]}.", hint="rl_check_status says what else is known."
        ) from error
    return shown_values(redact(loaded, known_secrets(context, run_id)))


async def shown_record(context: Context, reader: RunReader) -> Any:
    """``run.json``: state, processes, ports, times."""
    secrets = await anyio.to_thread.run_sync(known_secrets, context, reader.record.run_id)
    return shown_values(redact(reader.record.model_dump(mode="json"), secrets))
